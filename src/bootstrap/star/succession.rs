//! Who is the hub once rank 0 has left and its process has ended: the lowest rank that is left.
//!
//! Every rank but 0 has a socket that listens from the beginning, and all know where. An orphan
//! waits a moment, since at the end of a job all are about to leave, and then tries the ranks
//! below its own in order: one that refuses is gone. Who finds nobody there is the hub.
//! The others come to it one by one, tell it of a failure that it may not know, and hear of those
//! that it knows. Ranks that have not come are absent: alive and on their way, stopped, dead, or
//! gone in good order with a goodbye that nobody read any more. Those whose process is seen to be
//! gone count as departed.

use super::hub::Hub;
use super::monitor::*;
use super::*;
use crate::bootstrap::auth::{Attempt, attempt_within};
use crate::bootstrap::wire::{Writer, damaged};
use nix::poll::PollFd;

/// Longest pause between the end of a hub and the search for the next, and between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// How long an attempt may take: the monitor does nothing else meanwhile, and has no connection.
const ATTEMPT: Duration = Duration::from_secs(1);
/// A host that has not answered for so long is given up.
const LOST_AFTER: Duration = Duration::from_secs(3);

pub(super) struct Succession {
    /// The rank that is the hub, or was the last one.
    pub(super) hub: usize,
    terms: Terms,
    /// None on rank 0, and on ranks that leave with nothing to tell.
    listener: Option<Listener>,
    /// When to look for the next hub: the last one is gone.
    seek_at: Option<Instant>,
    /// Since when this rank cannot be reached.
    lost: Option<(usize, Instant)>,
}

impl Succession {
    pub(super) fn new(terms: Terms, listener: Option<Listener>) -> Succession {
        Succession {
            hub: 0,
            terms,
            listener,
            seek_at: None,
            lost: None,
        }
    }

    pub(super) fn is_seeking(&self) -> bool {
        self.seek_at.is_some()
    }

    /// The next moment at which there is something to do, if it comes before `other`.
    pub(super) fn next_or(&self, other: Instant) -> Instant {
        self.seek_at.map_or(other, |at| at.min(other))
    }

    /// Nobody will find this rank any more.
    pub(super) fn close(&mut self) {
        self.listener = None;
    }
}

impl Monitor {
    /// The hub `rank` is gone.
    pub(super) fn lose_hub(&mut self, rank: usize) {
        self.shared.depart(rank);
        self.shared.state().hub = None;
        self.succession.seek_at = Some(Instant::now() + self.shared.beat.min(PAUSE));
    }

    /// Tries to find the next hub, if it is time.
    pub(super) fn seek_hub(&mut self) {
        if self.succession.seek_at.is_none_or(|at| Instant::now() < at) {
            return;
        }
        let me = self.shared.rank;
        while let Some(rank) = (0..me).find(|&rank| !self.shared.is_departed(rank)) {
            match self.try_hub(rank) {
                Attempt::Reached(peer) => return self.follow(rank, *peer),
                Attempt::Gone => self.shared.depart(rank),
                Attempt::Lost if self.is_given_up(rank) => self.shared.depart(rank),
                Attempt::Lost | Attempt::Silent => {
                    let pause = self.shared.beat.min(PAUSE);
                    self.succession.seek_at = Some(Instant::now() + pause);
                    return;
                }
            }
        }
        self.become_hub();
    }

    fn try_hub(&self, rank: usize) -> Attempt {
        let shared = &self.shared;
        let member = &shared.members[rank];
        if let Fate::Dead(_) = look(&shared.members[shared.rank], member) {
            return Attempt::Gone;
        }
        let address = SocketAddr::new(member.info.address, member.control_port);
        match attempt_within(address, &self.succession.terms, ATTEMPT) {
            Attempt::Reached(peer) if peer.rank != rank => Attempt::Gone,
            other => other,
        }
    }

    /// Whether `rank`, which could not be reached just now, could not be for a long time.
    fn is_given_up(&mut self, rank: usize) -> bool {
        let lost = self.succession.lost.filter(|(other, _)| *other == rank);
        let (_, since) = *self
            .succession
            .lost
            .insert(lost.unwrap_or((rank, Instant::now())));
        since.elapsed() >= LOST_AFTER
    }

    fn follow(&mut self, rank: usize, peer: Peer) {
        let Ok(channel) = Channel::new(peer) else {
            // It sees the connection end before a first frame, which is no failure.
            self.succession.seek_at = Some(Instant::now() + PAUSE);
            return;
        };
        self.watch_if_far(rank, &channel);
        self.succession.hub = rank;
        self.succession.seek_at = None;
        self.shared.state().hub = Some(rank);
        self.links.clear();
        self.add_link(rank, channel, true);
        let beat = Body::new(self.leaf_beat());
        self.links[0].send(BEAT, &beat);
        if let Some(failure) = &self.failure {
            self.links[0].send(ANNOUNCE, &failure.body);
        }
        if self.leaving.is_some() {
            self.links[0].send(GOODBYE, &Body::new(Vec::new()));
        }
    }

    fn become_hub(&mut self) {
        self.succession.hub = self.shared.rank;
        self.succession.seek_at = None;
        self.links.clear();
        // The ranks before this one are gone: no exchange of all will complete.
        let gone = Error::new(ErrorKind::Remote, self.gone_hub(0));
        self.hub = Hub::without_exchanges(self.shared.peers.len(), gone);
        // Whoever drops the star waits for this thread unless it serves. The lock makes both agree.
        let mut state = self.shared.state();
        state.hub = Some(self.shared.rank);
        state.serves = self.leaving.is_none() && !state.is_leaving();
    }

    pub(super) fn gone_hub(&self, rank: usize) -> String {
        format!(
            "{} has left, and with it the exchanges of all ranks",
            self.shared.peers[rank]
        )
    }

    /// What the hub polls for ranks that come to it.
    pub(super) fn doors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = self.succession.listener.as_ref().filter(|_| self.is_hub());
        open.into_iter().flat_map(Listener::descriptors)
    }

    /// How long the hub may sleep without regard to strangers.
    pub(super) fn patience(&self) -> Option<Duration> {
        let open = self.succession.listener.as_ref().filter(|_| self.is_hub());
        open.map(|listener| listener.patience(Instant::now()))
    }

    /// Lets in who has proved itself, of what [`Monitor::doors`] found ready.
    pub(super) fn admit(&mut self, ready: &[bool]) {
        if !self.is_hub() {
            return;
        }
        let Some(listener) = &mut self.succession.listener else {
            return;
        };
        if let Err(error) = listener.serve(&self.succession.terms, ready) {
            // Nobody can come any more; those who are here stay.
            self.shared.notice.say(&error.to_string());
            return self.succession.close();
        }
        let arrivals: Vec<Peer> = std::iter::from_fn(|| listener.next()).flatten().collect();
        for peer in arrivals {
            self.welcome(peer);
        }
    }

    fn welcome(&mut self, peer: Peer) {
        let rank = peer.rank;
        let nranks = self.shared.peers.len();
        let Ok(channel) = Channel::new(peer) else {
            return;
        };
        if rank >= nranks || rank == self.shared.rank {
            return;
        }
        self.watch_if_far(rank, &channel);
        // One that came before and gave up waiting for the welcome comes again.
        self.links.retain(|link| link.rank != rank);
        self.add_link(rank, channel, false);
        let departed: Vec<usize> = (0..nranks)
            .filter(|&rank| self.shared.is_departed(rank))
            .collect();
        let Some(link) = self.links.last_mut() else {
            return;
        };
        for gone in departed.into_iter().filter(|&gone| gone != rank) {
            link.send(DEPARTED, &of_rank(gone));
        }
        if let Some(failure) = &self.failure {
            link.send(ANNOUNCE, &failure.body);
        }
        if self.leaving.is_some() {
            link.send(GOODBYE, &Body::new(Vec::new()));
        }
    }

    pub(super) fn watch_if_far(&self, rank: usize, channel: &Channel) {
        let host = |rank: usize| self.shared.peers[rank].host_id;
        if host(rank) != host(self.shared.rank) {
            channel.watch_link();
        }
    }

    /// Ranks that have not come to this hub, nor said goodbye. All came to rank 0.
    pub(super) fn absent(&self) -> impl Iterator<Item = usize> {
        let came = |rank: usize| {
            let mut links = self.links.iter();
            links.any(|link| link.rank == rank && link.confirmed)
        };
        let count = match self.is_hub() && self.shared.rank > 0 {
            true => self.shared.peers.len(),
            false => 0,
        };
        (0..count).filter(move |&rank| {
            rank != self.shared.rank && !self.shared.is_departed(rank) && !came(rank)
        })
    }

    /// Looks for processes of absent ranks on this host, and asks those who are near the others.
    pub(super) fn miss_absent(&mut self) {
        let absent: Vec<usize> = self.absent().collect();
        let me = self.shared.rank;
        for rank in absent {
            let members = &self.shared.members;
            if let Fate::Dead(_) = look(&members[me], &members[rank]) {
                self.count_as_departed(rank);
                continue;
            }
            let host = |rank: usize| self.shared.peers[rank].host_id;
            let (body, place) = (of_rank(rank), host(rank));
            if place != host(me) {
                let shared = &self.shared;
                let mut near = self
                    .links
                    .iter_mut()
                    .filter(|link| shared.peers[link.rank].host_id == place);
                if let Some(link) = near.next() {
                    link.send(MISSING, &body);
                }
            }
        }
    }

    /// A rank near an absent one says that its process is gone.
    pub(super) fn hear_of_absent(&mut self, rank: usize) -> Result<()> {
        if rank >= self.shared.peers.len() {
            return Err(damaged());
        }
        if self.absent().any(|absent| absent == rank) {
            self.count_as_departed(rank);
        }
        Ok(())
    }

    /// Whether an absent rank had said goodbye cannot be known, and nothing will come from it
    /// either way.
    fn count_as_departed(&mut self, rank: usize) {
        self.shared.depart(rank);
        self.tell_all_but(None, DEPARTED, &of_rank(rank));
    }

    /// While there is no hub: processes on this host that are gone count as departed.
    pub(super) fn look_around(&mut self) {
        let me = &self.shared.members[self.shared.rank];
        for (rank, member) in self.shared.members.iter().enumerate() {
            if !self.shared.is_departed(rank) && matches!(look(me, member), Fate::Dead(_)) {
                self.shared.depart(rank);
            }
        }
    }
}

/// The body of a frame about one rank.
pub(super) fn of_rank(rank: usize) -> Arc<Body> {
    let mut writer = Writer::default();
    writer.u32(rank as u32);
    Body::new(writer.0)
}
