//! Communicators made from another one: split, split after an abort, shrink.

use super::Communicator;
use super::init::{by_id, connect};
use crate::bootstrap::{OutOfBand, PeerInfo, ShrinkRendezvous, UniqueId};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    let all: Vec<usize> = (0..comm.nranks()).collect();
    // The temporary control plane gets a child fault: a failure of the new communicator ends it.
    // A failure of the control plane does not fail the new communicator.
    let rendezvous = shrink_rendezvous(comm)?;
    let exchange = rendezvous
        .reconnect(&all, &config, &fault.child())
        .map_err(|error| name_dead(rendezvous, &all, error))?;
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
    // Ids of the new communicators never travel whole: their secret is derived from the parent's key.
    let parent = exchange.key("split");
    let opened = leads.then(|| UniqueId::create_under(&parent, &config));
    let part = opened.as_ref().map_or(Vec::new(), encode_split_id);
    let all = exchange.all_gather(&part).inspect_err(|error| {
        if let Some(Ok(id)) = &opened {
            cancel(id, &peers[own], error);
        }
    })?;
    let Some(&(_, leader)) = members.first() else {
        return Ok(None);
    };
    let id = decode_split_id(&all[leader], &peers[leader], &parent)?;
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
pub(super) fn cancel(id: &UniqueId, me: &PeerInfo, error: &Error) {
    let who = format!("{me} cannot be part of the new communicator");
    id.cancel_because(&error.clone().context(who));
}

/// First byte of a leader's message that holds the public part of an id.
const SPLIT_ID: u8 = 1;
/// First byte of a leader's message that holds the reason why there is no id.
const SPLIT_ERROR: u8 = 2;

/// Encodes the message of a split's leader: the public part of the id, or the reason why there is none. The reason
/// keeps other ranks from waiting for the id.
fn encode_split_id(id: &Result<UniqueId>) -> Vec<u8> {
    match id {
        Ok(id) => [&[SPLIT_ID], &id.public_part()[..]].concat(),
        Err(error) => [&[SPLIT_ERROR], error.to_string().as_bytes()].concat(),
    }
}

/// Decodes the message of `leader`, which [`encode_split_id`] made. `parent` is the key from which the id's
/// secret is derived.
fn decode_split_id(message: &[u8], leader: &PeerInfo, parent: &[u8; 32]) -> Result<UniqueId> {
    match message {
        [SPLIT_ID, part @ ..] => UniqueId::from_public_part(part, parent)
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

/// Makes a communicator of the ranks of `comm` that are not in `exclude`, or, if that is empty, of
/// the ranks that have neither left nor died.
pub(super) fn shrink(
    comm: &Communicator,
    exclude: &[usize],
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    let rendezvous = shrink_rendezvous(comm)?;
    let exclude = match exclude {
        [] => known_lost(comm, rendezvous)?,
        named => checked(comm, named)?,
    };
    let all = 0..comm.nranks();
    let members: Vec<usize> = all.filter(|rank| !exclude.contains(rank)).collect();
    let begun = Instant::now();
    let made = rendezvous
        .reconnect(&members, &config, &fault)
        .and_then(|exchange| connect(exchange, fault, config, begun))
        // All ranks have connected when the last exchange ends, and no local step follows it. So
        // either all remaining ranks get the new communicator or none does.
        .and_then(|made| made.prepare_to_shrink().map(|()| made));
    made.map_err(|error| name_dead(rendezvous, &members, error))
}

/// Returns the ranks that a caller of shrink excludes.
fn checked(comm: &Communicator, exclude: &[usize]) -> Result<Vec<usize>> {
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
    Ok(exclude.to_vec())
}

/// Returns the ranks that have left or died.
fn known_lost(comm: &Communicator, rendezvous: &ShrinkRendezvous) -> Result<Vec<usize>> {
    let lost = rendezvous.find_lost();
    match lost.is_empty() {
        false => Ok(lost),
        true => Err(Error::invalid_usage(format!(
            "no rank of this communicator of {} ranks is known to have left or died: name the ranks \
             that shrink excludes",
            comm.nranks()
        ))),
    }
}

/// Time in which the sockets of a process that has died are all closed.
const DEATH_TIMEOUT: Duration = Duration::from_millis(300);

/// Names the ranks that died, if that explains `error`: the end of a connection names no rank of the
/// communicator that is shrunk.
fn name_dead(rendezvous: &ShrinkRendezvous, members: &[usize], error: Error) -> Error {
    use ErrorKind::{Aborted, Mismatch, Remote, Timeout};
    if !matches!(error.kind(), Aborted | Mismatch | Remote | Timeout) {
        return error;
    }
    let until = Instant::now() + DEATH_TIMEOUT;
    loop {
        let ended = rendezvous.find_ended(members);
        if !ended.is_empty() {
            let death = rendezvous.death(&ended);
            // A rank whose settings differ may have ended because of that.
            return match error.kind() {
                Mismatch => death.context(error.message()),
                _ => death,
            };
        }
        if Instant::now() >= until {
            return error;
        }
        std::thread::sleep(DEATH_TIMEOUT / 10);
    }
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
        let parent = [7; 32];
        let id = UniqueId::create_under(&parent, &Config::default()).unwrap();
        let len = id.public_part().len();
        let decode = |message: &[u8]| decode_split_id(message, leader, &parent);
        assert!(decode(&encode_split_id(&Ok(id))).unwrap() == id);
        id.cancel();
        let name = Error::invalid_argument("").to_string().len();
        for length in [0, len - name - 1, len - name, len] {
            let why = Error::invalid_argument("x".repeat(length));
            let error = decode(&encode_split_id(&Err(why.clone()))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{length}: {error}");
            let message = format!("{leader} cannot lead a split: {why}");
            assert_eq!(error.message(), message);
        }
        for nonsense in [vec![], vec![3; len + 1]] {
            let error = decode(&nonsense).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        }
    }
}
