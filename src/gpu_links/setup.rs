//! State that all phases of connecting share, and the rounds in which ranks exchange results.

use super::paths::{LinkClass, PathFailures};
use super::round_messages::PathReport;
use crate::bootstrap::PeerInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Context;
use crate::schedule::Groups;
use crate::transport::ConnectContext;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State of a rank while it connects its GPU.
pub(super) struct LinkSetup<'a> {
    pub context: &'a ConnectContext<'a>,
    pub gpu: &'a Arc<Context>,
    pub me: usize,
    pub peers: &'a [PeerInfo],
    pub hosts: Groups,
}

impl<'a> LinkSetup<'a> {
    pub fn new(context: &'a ConnectContext<'a>, gpu: &'a Arc<Context>) -> LinkSetup<'a> {
        let peers = context.exchange.peers();
        LinkSetup {
            context,
            gpu,
            me: context.exchange.rank(),
            peers,
            hosts: Groups::of_hosts(peers.iter().map(|peer| peer.host_id)),
        }
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.peers.len()
    }

    /// Returns whether `peer` is a rank of this process.
    pub fn shares_process(&self, peer: usize) -> bool {
        self.peers[peer].process_id == self.peers[self.me].process_id
    }

    /// Returns the time until the deadline.
    pub fn time_left(&self) -> Duration {
        let deadline = self.context.deadline;
        deadline.saturating_duration_since(Instant::now())
    }

    /// # Errors
    /// The fault's reason if a rank has failed; timeout if the deadline has passed.
    pub fn check_deadline(&self) -> Result<()> {
        self.context.fault.check()?;
        if self.time_left().is_zero() {
            return Err(Error::new(
                ErrorKind::Timeout,
                "connecting GPUs took longer than CINCH_INIT_TIMEOUT",
            ));
        }
        Ok(())
    }

    /// Returns once all ranks have called `barrier`.
    pub fn barrier(&self) -> Result<()> {
        self.context.exchange.barrier()
    }

    /// Sends `mine` to all ranks and returns the messages of all ranks, in rank order. A rank that has failed
    /// sends its error, so that the other ranks fail in this round and not at the deadline.
    ///
    /// # Errors
    /// `mine`, if it is an error, after the other ranks have received it; remote, naming the rank that
    /// failed; the errors of the exchange.
    pub fn round(&self, mine: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let exchange = self.context.exchange;
        let all = exchange.gather_results("connect its GPU", &mine)?;
        mine?;
        all.into_iter().collect()
    }

    /// Exchanges the reports of all ranks and records their failures in rank order, so that all ranks record
    /// equal failures. Returns the classes of links that each rank reports.
    pub fn agree(
        &self,
        mine: Result<PathReport>,
        failures: &mut PathFailures,
    ) -> Result<Vec<Vec<LinkClass>>> {
        let parts = self.round(mine.map(|report| report.encode()))?;
        let mut classes = Vec::new();
        for (reporter, part) in parts.iter().enumerate() {
            let report = PathReport::decode(part, &self.peers[reporter], self.nranks())?;
            classes.push(report.classes);
            for (peer, reason) in report.failures {
                failures.record(reporter, peer, reason);
            }
        }
        Ok(classes)
    }

    /// Returns a number that only this communicator uses.
    pub fn nonce(&self) -> u64 {
        let key = self.context.exchange.key("cuda path probe");
        u64::from_le_bytes(std::array::from_fn(|at| key[at]))
    }
}
