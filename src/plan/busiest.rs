//! Samples a few ranks and hosts to find the busiest, so that costing a candidate does not generate the
//! schedules of every rank.

use super::Request;
use super::limits::Limits;
use crate::error::Result;
use crate::schedule::{self, Groups, SchedulePattern};
use std::iter;

/// Returns a sample of ranks, first the root, or rank 0, and then others; the busiest of each kind is taken as the busiest
/// of all. Every rank samples alike. With several hosts, the last sampled rank is on the last of the sampled [`hosts`].
pub(super) fn busiest(request: &Request, limits: &Limits) -> impl Iterator<Item = usize> + use<> {
    let (nranks, root) = (limits.nranks, request.root);
    let beside = match limits.hosts.count() {
        1 => None,
        _ => hosts(&limits.hosts, root).next_back(),
    };
    let beside = beside.map(|host| limits.hosts.ranks(host)[0] as usize);
    let others = [(root + 1) % nranks, (root + nranks / 2) % nranks];
    let others = others.into_iter().chain(beside);
    iter::once(root).chain(others.filter(move |&rank| rank != root))
}

/// Returns the sampled hosts: the host of `root` and the next two in number, modulo the number of
/// hosts. In trees the root has no parent and few children. The third host has two children if any
/// host has two.
fn hosts(hosts: &Groups, root: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let (home, count) = (hosts.of(root).0, hosts.count());
    (0..count.min(3)).map(move |behind| (home + behind) % count)
}

/// Number of ranks of a host, beside the root, whose schedules are generated to count the messages that leave the host.
/// Their count is scaled up to all ranks of the host but the root.
const LOOKED_AT: usize = 8;

/// Returns how many messages leave a host in one pass, for the sampled host that sends most.
pub(super) fn leaving(pattern: &SchedulePattern, limits: &Limits) -> Result<usize> {
    if limits.hosts.count() == 1 {
        return Ok(0);
    }
    let leaving = |rank: usize| -> Result<usize> {
        let schedule = pattern.schedule(rank)?;
        Ok(schedule::cost_counts(&schedule, &limits.hosts).crossing[0])
    };
    let mut most = 0;
    for host in hosts(&limits.hosts, pattern.root) {
        let ranks = limits.hosts.ranks(host);
        let others = || {
            ranks
                .iter()
                .map(|&rank| rank as usize)
                .filter(|&rank| rank != pattern.root)
        };
        let (others_count, looked_at) = (others().count(), others().take(LOOKED_AT));
        let mut messages = 0;
        for rank in looked_at {
            messages += leaving(rank)?;
        }
        messages = (messages * others_count).div_ceil(others_count.clamp(1, LOOKED_AT));
        if others_count < ranks.len() {
            messages += leaving(pattern.root)?;
        }
        most = most.max(messages);
    }
    Ok(most)
}
