//! Communicators with more ranks: new processes join the ranks of a communicator.
//!
//! A rank of the communicator makes an id and serves the rendezvous. The program hands the id to the new ranks, which join
//! by it as in an init. The ranks of the communicator send each other the public part of the id over their
//! control plane, derive its secret, and join as well.

use super::Communicator;
use super::init::by_id;
use super::split::cancel;
use crate::bootstrap::{Growth, MAX_RANKS, PeerInfo, UniqueId};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{CAUSE_TIMEOUT, Fault};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Purpose of the key from which the secrets of ids for new ranks are derived.
const PURPOSE: &str = "grow";

/// Makes the id by which new ranks join `comm` in its next grow. An earlier id that was not used ends.
pub(super) fn create_id(comm: &Communicator) -> Result<UniqueId> {
    comm.check_fault()?;
    let growth = Growth {
        nranks: comm.nranks(),
        server: comm.rank(),
    };
    let key = comm.exchange.key(PURPOSE);
    let id = UniqueId::create_for_growth(&key, growth, &comm.config)?;
    if let Some(unused) = replace_id(comm, Some(id)) {
        unused.cancel();
    }
    Ok(id)
}

/// Stores the id of this rank for the next grow, and returns the id before.
fn replace_id(comm: &Communicator, id: Option<UniqueId>) -> Option<UniqueId> {
    let mut stored = comm.grow_id.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::replace(&mut *stored, id)
}

/// Ends the rendezvous of an id that no grow will use. New ranks that have registered, or do soon, receive the
/// error, if there is one; otherwise they would wait for the others.
pub(super) fn cancel_unused(comm: &Communicator, error: Option<&Error>) {
    match (replace_id(comm, None), error) {
        (Some(unused), Some(error)) => cancel(&unused, &comm.peers()[comm.rank()], error),
        (Some(unused), None) => unused.cancel(),
        (None, _) => {}
    }
}

/// Joins as a new rank if `id` is of a communicator that grows, else as in any init.
pub(super) fn join(
    id: &UniqueId,
    rank: usize,
    nranks: usize,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    if id.growth().is_none() {
        return by_id(id, rank, nranks, config, fault);
    }
    check_new_rank(id, rank, nranks)?;
    let made = by_id(id, rank, nranks, config, fault)?;
    made.prepare_to_shrink().map(|()| made)
}

/// Checks that a communicator of `old` ranks can grow to `nranks`.
fn check_number(old: usize, nranks: usize) -> Result<()> {
    if !(old + 1..=MAX_RANKS).contains(&nranks) {
        return Err(Error::invalid_argument(format!(
            "a communicator of {old} ranks cannot grow to {nranks}: its new number is above {old} and at \
             most {MAX_RANKS}"
        )));
    }
    Ok(())
}

/// Checks that `rank` of `nranks` can be a new rank of the communicator of `id`.
pub(super) fn check_new_rank(id: &UniqueId, rank: usize, nranks: usize) -> Result<()> {
    let Some(Growth { nranks: old, .. }) = id.growth() else {
        return Err(Error::invalid_argument(
            "the unique id is of an init; new ranks need the id that a rank of the growing communicator made",
        ));
    };
    check_number(old, nranks)?;
    if !(old..nranks).contains(&rank) {
        return Err(Error::invalid_argument(format!(
            "rank {rank} cannot join a communicator that grows from {old} to {nranks} ranks: its new ranks \
             are {old} to {}",
            nranks - 1
        )));
    }
    Ok(())
}

/// Checks that `comm` can grow to `nranks` by `id`, if this rank passes one.
pub(super) fn check(comm: &Communicator, nranks: usize, id: Option<&UniqueId>) -> Result<()> {
    let old = comm.nranks();
    check_number(old, nranks)?;
    let Some(id) = id else { return Ok(()) };
    let derived = UniqueId::from_public_part(&id.public_part(), &comm.exchange.key(PURPOSE))?;
    if derived != *id || id.growth().is_none() {
        return Err(Error::invalid_argument(format!(
            "no rank of this communicator of {old} ranks made this unique id for new ranks"
        )));
    }
    Ok(())
}

/// Makes a communicator of the ranks of `comm`, by their numbers, and of new ranks after them. `fault` is a child
/// of the fault of `comm` until all ranks are connected.
pub(super) fn grow(
    comm: &Communicator,
    nranks: usize,
    id: Option<&UniqueId>,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    check(comm, nranks, id)?;
    let agreed = comm.check_fault().and_then(|()| agree(comm, nranks, id));
    let id = agreed.inspect_err(|error| cancel_unused(comm, Some(error)))?;
    let made = by_id(&id, comm.rank(), nranks, config, fault.clone());
    // All ranks have connected, and the next exchange ends on all of them. Without the exchange, a failure of
    // `comm` could still fail some of them.
    comm.fault.detach(&fault);
    made.and_then(|made| made.prepare_to_shrink().map(|()| made))
        .map_err(|error| {
            cancel(&id, &comm.peers()[comm.rank()], &error);
            // A closed connection to the rendezvous may be the death of a rank.
            match error.kind() {
                ErrorKind::Remote => comm.fault.reason_within(CAUSE_TIMEOUT).unwrap_or(error),
                _ => error,
            }
        })
}

/// Exchanges the new number of ranks and the public part of the id. Returns the id.
fn agree(comm: &Communicator, nranks: usize, id: Option<&UniqueId>) -> Result<UniqueId> {
    let stored = *comm.grow_id.lock().unwrap_or_else(PoisonError::into_inner);
    let own = GrowProposal {
        nranks,
        id: id.copied().or(stored).map(|id| id.public_part()),
    };
    let exchange = &comm.exchange;
    exchange.limit_exchanges(Some(Instant::now() + comm.config.init_timeout));
    let all = exchange.all_gather(&own.encode());
    exchange.limit_exchanges(None);
    let all = comm.fail_on_error(all)?;
    let part = choose(&all, comm.rank(), comm.peers())?;
    let chosen = UniqueId::from_public_part(&part, &exchange.key(PURPOSE))?;
    // An id serves one grow, also if that fails.
    if stored.is_some_and(|stored| stored == chosen) {
        replace_id(comm, None);
    }
    Ok(chosen)
}

/// A rank's arguments of grow, as all ranks exchange them.
#[derive(Debug, PartialEq)]
struct GrowProposal {
    nranks: usize,
    /// Public part of the id, on a rank that has it.
    id: Option<Vec<u8>>,
}

/// First byte of an encoded proposal. A rank that calls split sends 0 or 1.
const PROPOSAL: u8 = 3;

impl GrowProposal {
    fn encode(&self) -> Vec<u8> {
        let nranks = (self.nranks as u32).to_le_bytes();
        [&[PROPOSAL], &nranks[..], self.id.as_deref().unwrap_or(&[])].concat()
    }

    fn decode(bytes: &[u8]) -> Option<GrowProposal> {
        let (nranks, id) = bytes.strip_prefix(&[PROPOSAL])?.split_first_chunk()?;
        Some(GrowProposal {
            nranks: u32::from_le_bytes(*nranks) as usize,
            id: (!id.is_empty()).then(|| id.to_vec()),
        })
    }
}

/// Returns the public part of the id that ranks pass; the error is equal on all ranks that call grow.
fn choose(all: &[Vec<u8>], own: usize, peers: &[PeerInfo]) -> Result<Vec<u8>> {
    let mismatch = |text| Err(Error::new(ErrorKind::Mismatch, text));
    let mut chosen: Option<(usize, Vec<u8>)> = None;
    let mut first = None;
    for (rank, bytes) in all.iter().enumerate() {
        let peer = &peers[rank];
        let Some(GrowProposal { nranks, id }) = GrowProposal::decode(bytes) else {
            let me = &peers[own];
            return mismatch(format!(
                "{me} calls grow and {peer} does not: all ranks must call it together"
            ));
        };
        let known = *first.get_or_insert(nranks);
        if nranks != known {
            let first = &peers[0];
            return mismatch(format!(
                "{first} grows the communicator to {known} ranks, {peer} to {nranks}"
            ));
        }
        match (&chosen, id) {
            (Some((other, known)), Some(id)) if *known != id => {
                let other = &peers[*other];
                return mismatch(format!(
                    "{other} and {peer} have different ids for new ranks: one rank makes the id of a grow"
                ));
            }
            (None, Some(id)) => chosen = Some((rank, id)),
            _ => {}
        }
    }
    chosen.map(|(_, id)| id).ok_or_else(|| {
        Error::invalid_usage(format!(
            "none of the {} ranks has made an id for new ranks since the last grow; one rank makes it and \
             hands it to the new ranks",
            peers.len()
        ))
    })
}
