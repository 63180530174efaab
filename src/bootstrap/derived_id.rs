//! Ids whose secret is derived from a key of the ranks that already know each other. These ranks send each
//! other only the public part of such an id. The ids of a split never leave them. The program hands the id of
//! a grow to the new ranks, whole.

use super::id::{CHECKSUM, FORMAT, GROWS, NONCE, PARTICIPANTS, SECRET, assemble, checksum};
use super::{UniqueId, address, idle_rendezvous, keys};
use crate::config::Config;
use crate::error::{Error, Result};

/// Nonce, addresses and growth.
const PUBLIC: std::ops::Range<usize> = NONCE.start..CHECKSUM;
/// Length of a public part: the flags come first.
const PART_BYTES: usize = 1 + PUBLIC.end - PUBLIC.start;

/// A communicator whose ranks new ranks can join by an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Number of ranks before new ones join; at most [`super::MAX_RANKS`].
    pub(crate) nranks: usize,
    /// Rank that made the id and serves its rendezvous.
    pub(crate) server: usize,
}

impl UniqueId {
    /// Makes an id as [`UniqueId::create`] does, for ranks that know the secret key `parent`. Its secret
    /// is derived from that key, so the other ranks need only [`UniqueId::public_part`].
    ///
    /// # Errors
    /// As for [`UniqueId::create`].
    pub(crate) fn create_under(parent: &keys::DerivedKey, config: &Config) -> Result<UniqueId> {
        create(parent, None, config)
    }

    /// Makes an id as [`UniqueId::create_under`] does, by which new ranks join the ranks that know `parent`.
    ///
    /// # Errors
    /// As for [`UniqueId::create`].
    pub(crate) fn create_for_growth(
        parent: &keys::DerivedKey,
        growth: Growth,
        config: &Config,
    ) -> Result<UniqueId> {
        create(parent, Some(growth), config)
    }

    /// Returns the communicator that new ranks join by this id; `None` for an id of an init or a split.
    pub(crate) fn growth(&self) -> Option<Growth> {
        let number = |at: usize| u16::from_le_bytes([self.0[at], self.0[at + 1]]).into();
        (self.0[1] & GROWS != 0).then(|| Growth {
            nranks: number(PARTICIPANTS),
            server: number(PARTICIPANTS + 2),
        })
    }

    /// Returns the id without its secret.
    pub(crate) fn public_part(&self) -> Vec<u8> {
        [&self.0[1..2], &self.0[PUBLIC]].concat()
    }

    /// Returns the id that [`UniqueId::create_under`] or [`UniqueId::create_for_growth`] made under `parent` and
    /// that has this public part.
    ///
    /// # Errors
    /// Invalid argument if the public part has another length or names no address.
    pub(crate) fn from_public_part(part: &[u8], parent: &keys::DerivedKey) -> Result<UniqueId> {
        if part.len() != PART_BYTES {
            return Err(Error::invalid_argument(format!(
                "the public part of an id has {PART_BYTES} bytes, these are {}",
                part.len()
            )));
        }
        let mut bytes = [0; 128];
        (bytes[0], bytes[1]) = (FORMAT, part[0]);
        bytes[PUBLIC].copy_from_slice(&part[1..]);
        let nonce: [u8; 16] = std::array::from_fn(|at| bytes[NONCE.start + at]);
        bytes[SECRET].copy_from_slice(&secret_under(parent, &nonce));
        let sum = checksum(&bytes);
        bytes[CHECKSUM..].copy_from_slice(&sum);
        UniqueId::from_bytes(&bytes)
    }
}

fn create(parent: &keys::DerivedKey, growth: Option<Growth>, config: &Config) -> Result<UniqueId> {
    let nonce = keys::random::<16>()?;
    let secret = secret_under(parent, &nonce);
    let make = |address| match growth {
        None => assemble(0, &secret, &nonce, &[address]),
        Some(growth) => {
            let mut id = assemble(GROWS, &secret, &nonce, &[address]);
            for (at, number) in [(0, growth.nranks), (2, growth.server)] {
                let number = (number as u16).to_le_bytes();
                id.0[PARTICIPANTS + at..][..2].copy_from_slice(&number);
            }
            let sum = checksum(&id.0);
            id.0[CHECKSUM..].copy_from_slice(&sum);
            id
        }
    };
    idle_rendezvous::open(address::choose(config)?, make, config)
}

/// Derives the secret of an id from the secret key of ranks that share it.
fn secret_under(parent: &keys::DerivedKey, nonce: &[u8; 16]) -> keys::DerivedKey {
    keys::derive(parent, nonce, "secret of an id")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_follows_from_its_public_part_and_the_key() {
        let (parent, config) = ([7; 32], Config::default());
        let growth = Growth {
            nranks: 4096,
            server: 4095,
        };
        let grows = UniqueId::create_for_growth(&parent, growth, &config).unwrap();
        let splits = UniqueId::create_under(&parent, &config).unwrap();
        assert_eq!(grows.growth(), Some(growth));
        assert_eq!((splits.growth(), grows.participants()), (None, 0));
        for id in [grows, splits] {
            let part = id.public_part();
            assert!(UniqueId::from_public_part(&part, &parent).unwrap() == id);
            assert!(UniqueId::from_public_part(&part, &[8; 32]).unwrap() != id);
            assert!(!part.windows(8).any(|bytes| id.0[SECRET][..8] == *bytes));
            let error = UniqueId::from_public_part(&part[1..], &parent).unwrap_err();
            assert!(
                error.message().contains("has 77 bytes, these are 76"),
                "{error}"
            );
            id.cancel();
        }
    }
}
