//! Communicators made from another one: split, split after an abort, shrink.

use super::Communicator;
use super::init::by_id;
use crate::bootstrap::{ControlPlane, OutOfBand, PeerInfo, ShrinkRendezvous, UniqueId};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use std::sync::Arc;

/// Splits `comm` over its own control plane.
pub(super) fn split(
    comm: &Communicator,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    split_over(&*comm.exchange, color, key, config, fault)
}

/// Splits `comm`, which has failed, over a new control plane of its ranks.
pub(super) fn split_again(
    comm: &Communicator,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let all: Vec<usize> = (0..nranks).collect();
    let id = shrink_rendezvous(comm)?.rendezvous(&all, &config)?;
    // The temporary control plane gets a child fault: a failure of the new communicator ends it.
    // A failure of the control plane does not fail the new communicator.
    let exchange = ControlPlane::join(&id, rank, nranks, &config, fault.child())
        .inspect_err(|error| cancel(&id, &comm.peers()[rank], error))?;
    let made = split_over(&*exchange, color, key, config, fault);
    match &made {
        Ok(_) => exchange.leave(),
        // Without the announcement other ranks would wait for this rank.
        Err(error) => exchange.announce(error),
    }
    made
}

/// A rank's colour and key, as all ranks exchange them.
#[derive(Clone, Copy, PartialEq)]
struct Membership {
    color: Option<u32>,
    key: i64,
}

impl Membership {
    /// Encodes a byte that is 1 if there is a colour, then the colour and the key.
    fn encode(self) -> [u8; 13] {
        let mut bytes = [0; 13];
        if let Some(color) = self.color {
            bytes[0] = 1;
            bytes[1..5].copy_from_slice(&color.to_le_bytes());
            bytes[5..].copy_from_slice(&self.key.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Membership> {
        let bytes: &[u8; 13] = bytes.try_into().ok()?;
        let (color, key) = bytes[1..].split_at(4);
        let color = u32::from_le_bytes(color.try_into().ok()?);
        Some(Membership {
            color: (bytes[0] == 1).then_some(color),
            key: i64::from_le_bytes(key.try_into().ok()?),
        })
    }
}

/// Splits the ranks of `exchange`.
fn split_over(
    exchange: &dyn OutOfBand,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    let (own, peers) = (exchange.rank(), exchange.peers());
    let all = exchange.all_gather(&Membership { color, key }.encode())?;
    let mut members: Vec<(i64, usize)> = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let other = Membership::decode(bytes).ok_or_else(|| {
            Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {own} calls split and {} does not: all ranks must call it together",
                    peers[rank]
                ),
            )
        })?;
        if color.is_some() && other.color == color {
            members.push((other.key, rank));
        }
    }
    members.sort_unstable();
    let leads = members.first().is_some_and(|&(_, rank)| rank == own);
    let opened = leads.then(|| UniqueId::create(&config));
    let part = opened.as_ref().map_or(Vec::new(), encode_split_id);
    let all = exchange.all_gather(&part).inspect_err(|error| {
        if let Some(Ok(id)) = &opened {
            cancel(id, &peers[own], error);
        }
    })?;
    let Some(&(_, leader)) = members.first() else {
        return Ok(None);
    };
    let id = decode_split_id(&all[leader], &peers[leader])?;
    let rank = members
        .iter()
        .position(|&(_, rank)| rank == own)
        .ok_or_else(|| Error::internal("a rank is missing from its own split"))?;
    by_id(&id, rank, members.len(), config, fault)
        .inspect_err(|error| cancel(&id, &peers[own], error))
        .map(Some)
}

/// Cancels the rendezvous of `id` because `me` cannot join, if this process serves the rendezvous.
/// The other ranks get the reason instead of a timeout.
fn cancel(id: &UniqueId, me: &PeerInfo, error: &Error) {
    let who = format!("{me} cannot be part of the new communicator");
    id.cancel_because(&error.clone().context(who));
}

/// First byte of a leader's message that holds an id.
const SPLIT_ID: u8 = 1;
/// First byte of a leader's message that holds the reason why there is no id.
const SPLIT_ERROR: u8 = 2;

/// Encodes the message of a split's leader: the id, or the reason why there is none. The reason
/// keeps other ranks from waiting for the id.
fn encode_split_id(id: &Result<UniqueId>) -> Vec<u8> {
    match id {
        Ok(id) => [&[SPLIT_ID], id.as_bytes().as_slice()].concat(),
        Err(error) => [&[SPLIT_ERROR], error.to_string().as_bytes()].concat(),
    }
}

/// Decodes the message of `leader`, which [`encode_split_id`] made.
fn decode_split_id(message: &[u8], leader: &PeerInfo) -> Result<UniqueId> {
    match message {
        [SPLIT_ID, id @ ..] => UniqueId::from_slice(id)
            .map_err(|error| error.context(format!("the split that {leader} leads"))),
        [SPLIT_ERROR, why @ ..] => Err(Error::new(
            ErrorKind::Remote,
            format!(
                "{leader} cannot lead a split: {}",
                String::from_utf8_lossy(why)
            ),
        )),
        _ => Err(Error::new(
            ErrorKind::Mismatch,
            format!("{leader} leads a split in another format: use one version"),
        )),
    }
}

/// Makes a communicator of the ranks of `comm` that are not in `exclude`.
pub(super) fn shrink(
    comm: &Communicator,
    exclude: &[usize],
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    for (at, &gone) in exclude.iter().enumerate() {
        let why = if gone >= nranks {
            "is not one of its ranks"
        } else if gone == rank {
            "is the caller: ranks that are excluded do not call"
        } else if exclude[..at].contains(&gone) {
            "is listed twice"
        } else {
            continue;
        };
        return Err(Error::invalid_argument(format!(
            "shrinking a communicator of {nranks} ranks by {exclude:?}: {gone} {why}"
        )));
    }
    let members: Vec<usize> = (0..nranks).filter(|rank| !exclude.contains(rank)).collect();
    let own = members.iter().take_while(|&&other| other < rank).count();
    let id = shrink_rendezvous(comm)?.rendezvous(&members, &config)?;
    by_id(&id, own, members.len(), config, fault)
        .inspect_err(|error| cancel(&id, &comm.peers()[rank], error))
}

/// Returns the rendezvous for ranks of `comm` that [`Communicator::prepare_to_shrink`] opened.
fn shrink_rendezvous(comm: &Communicator) -> Result<&ShrinkRendezvous> {
    comm.owner.check()?;
    comm.shrink_rendezvous.get().ok_or_else(|| {
        Error::invalid_usage(
            "prepare_to_shrink was not called on this communicator while all its ranks existed",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap;

    /// The leader cannot join its own rendezvous, and rank 1 receives the reason. Otherwise rank 1
    /// would wait for the leader for 20 s.
    #[test]
    fn leader_that_cannot_join_its_split_is_reported_to_its_ranks() {
        let faults = [Fault::new(), Fault::new()];
        let world = bootstrap::LocalOutOfBand::world(2, &faults);
        let config = || Config {
            init_timeout: std::time::Duration::from_secs(20),
            ..Config::default()
        };
        let fault = Fault::new();
        fault.raise(Error::new(ErrorKind::Aborted, "enough"));
        let made = std::thread::scope(|scope| {
            let other = scope.spawn(|| split_over(&*world[1], Some(0), 0, config(), Fault::new()));
            let leader = split_over(&*world[0], Some(0), 0, config(), fault);
            [leader, other.join().unwrap()].map(|made| made.unwrap_err())
        });
        assert_eq!(made[0].message(), "enough");
        assert_eq!(made[1].kind(), ErrorKind::Aborted, "{}", made[1]);
        let me = &world[0].peers()[0];
        let reason = format!("{me} cannot be part of the new communicator: enough");
        assert_eq!(made[1].message(), reason);
    }

    /// The lengths of the error messages include the length of an id.
    #[test]
    fn reason_of_a_leader_is_no_id() {
        let faults = [Fault::new(), Fault::new()];
        let world = bootstrap::LocalOutOfBand::world(2, &faults);
        let leader = &world[0].peers()[1];
        let id = UniqueId::create_for_one_host(&Config::default()).unwrap();
        let len = id.as_bytes().len();
        assert!(decode_split_id(&encode_split_id(&Ok(id)), leader).unwrap() == id);
        let name = Error::invalid_argument("").to_string().len();
        for length in [0, len - name - 1, len - name, len] {
            let why = Error::invalid_argument("x".repeat(length));
            let error = decode_split_id(&encode_split_id(&Err(why.clone())), leader).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{length}: {error}");
            let message = format!("{leader} cannot lead a split: {why}");
            assert_eq!(error.message(), message);
        }
        for nonsense in [vec![], vec![3; len + 1]] {
            let error = decode_split_id(&nonsense, leader).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        }
    }
}
