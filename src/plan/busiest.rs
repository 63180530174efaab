//! Samples a few ranks and hosts to find the busiest, so that costing a candidate does not generate the
//! schedules of every rank.

use super::Request;
use super::limits::Limits;
use crate::error::Result;
use crate::schedule::{self, Groups, SchedulePattern};

/// Returns a sample of ranks; the busiest of them is taken as the busiest of all. Every rank
/// samples alike. With several hosts, the last sampled rank is on the last of the sampled
/// [`hosts`].
pub(super) fn busiest(request: &Request, limits: &Limits) -> impl Iterator<Item = usize> + use<> {
    let (nranks, root) = (limits.nranks, request.root);
    let beside = match limits.hosts.count() {
        1 => None,
        _ => hosts(&limits.hosts, root).next_back(),
    };
    let beside = beside.map(|host| limits.hosts.ranks(host)[0] as usize);
    [root, (root + 1) % nranks, nranks / 2]
        .into_iter()
        .chain(beside)
}

/// Returns the sampled hosts: the host of `root` and the next two in number, modulo the number of
/// hosts. In trees the root has no parent and few children. The third host has two children if any
/// host has two.
fn hosts(hosts: &Groups, root: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let (home, count) = (hosts.of(root).0, hosts.count());
    (0..count.min(3)).map(move |behind| (home + behind) % count)
}

/// Number of ranks of a host whose schedules are generated to count the messages that leave it. The
/// count is scaled up to all ranks of the host.
const LOOKED_AT: usize = 8;

/// Returns how many messages leave a host in one pass, for the sampled host that sends most.
pub(super) fn leaving(pattern: &SchedulePattern, limits: &Limits) -> Result<usize> {
    if limits.hosts.count() == 1 {
        return Ok(0);
    }
    let mut most = 0;
    for host in hosts(&limits.hosts, pattern.root) {
        let ranks = limits.hosts.ranks(host);
        let looked_at = &ranks[..ranks.len().min(LOOKED_AT)];
        let mut messages = 0;
        for &rank in looked_at {
            let schedule = pattern.schedule(rank as usize)?;
            messages += schedule::cost_counts(&schedule, &limits.hosts).crossing[0];
        }
        most = most.max((messages * ranks.len()).div_ceil(looked_at.len().max(1)));
    }
    Ok(most)
}
