//! Rank 0 accepts the control connections of all members, or sends them the reason of its failure.

use super::CLOSE_TIMEOUT;
use super::frames::ANNOUNCE;
use crate::bootstrap::auth::{HandshakeConfig, Listener, Peer, poll_for};
use crate::bootstrap::framed_stream::{Body, FramedStream};
use crate::bootstrap::process::ProcessState;
use crate::bootstrap::rank_entry::RankEntry;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::wire::Wire;
use nix::poll::PollFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of checks whether a member's process has ended before it connected.
const MEMBER_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time that a failed root waits for ranks whose processes it cannot look up.
const UNSEEN_RANK_TIMEOUT: Duration = Duration::from_millis(300);
/// Time that ranks have to close their connections after they received an error.
const HANG_UP_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval of checks which ranks may still connect to a failed root.
const LATE_MEMBER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Accepts the control connections of all other ranks, by rank. If that fails, ranks that have
/// connected or connect soon after receive the error. They receive none if the deadline has passed
/// or this rank has aborted.
pub(super) fn accept_members(
    mut listener: Listener,
    members: &[RankEntry],
    config: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> Result<Vec<(usize, Peer)>> {
    let mut connected: Vec<Option<Peer>> = members.iter().map(|_| None).collect();
    let accepting = MemberListener {
        members,
        config,
        deadline,
        fault,
    };
    let Err(error) = accepting.accept_all(&mut listener, &mut connected) else {
        let connected = connected.into_iter().enumerate();
        let connected = connected.filter_map(|(rank, peer)| Some((rank, peer?)));
        return Ok(connected.collect());
    };
    // Without the error, connected ranks would report that rank 0 has died.
    let mut report = FailureReport::new(&error);
    let missing = absent(&connected).collect();
    let connected = connected.into_iter().flatten();
    connected.for_each(|peer| report.send(FramedStream::new(peer)));
    match error.kind() {
        // The listener accepts no more, for lack of descriptors for example. A closed listener ends the waits of
        // members, which would otherwise last until the deadline. With a fault the error is that of another rank.
        ErrorKind::System if !fault.is_raised() => drop(listener),
        _ => accepting.report_to_late_members(listener, missing, &mut report),
    }
    report.finish();
    Err(error)
}

/// Returns the ranks that have not connected.
fn absent(connected: &[Option<Peer>]) -> impl Iterator<Item = usize> {
    (1..connected.len()).filter(|&rank| connected[rank].is_none())
}

/// Context of a root that accepts members.
struct MemberListener<'a> {
    members: &'a [RankEntry],
    config: &'a HandshakeConfig,
    deadline: Instant,
    fault: &'a Fault,
}

impl MemberListener<'_> {
    fn accept_all(&self, listener: &mut Listener, connected: &mut [Option<Peer>]) -> Result<()> {
        while absent(connected).next().is_some() {
            let until = (Instant::now() + MEMBER_POLL_INTERVAL).min(self.deadline);
            match listener.accept_until(self.config, until, self.fault)? {
                Some(peer) => {
                    if let Some(place @ None) = connected.get_mut(peer.rank)
                        && peer.rank != 0
                    {
                        *place = Some(peer);
                    }
                }
                None => self.check_absent(connected)?,
            }
        }
        Ok(())
    }

    /// Fails if a member died before it connected, or at the deadline.
    fn check_absent(&self, connected: &[Option<Peer>]) -> Result<()> {
        let member = |rank: usize| &self.members[rank];
        for rank in absent(connected) {
            if let ProcessState::Ended(why) = self.members[0].state_of(member(rank)) {
                let died = format!("{} died: {why}", member(rank).info);
                return Err(Error::new(ErrorKind::Remote, died));
            }
        }
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let missing = absent(connected).count();
        let names = absent(connected).take(8);
        let names: Vec<String> = names.map(|rank| member(rank).info.to_string()).collect();
        Err(Error::new(
            ErrorKind::Timeout,
            format!(
                "{missing} ranks opened no control connection in time, among them {}",
                names.join(", ")
            ),
        ))
    }

    /// Sends the report to `missing` ranks that still connect: waits [`CLOSE_TIMEOUT`] for running
    /// processes, [`UNSEEN_RANK_TIMEOUT`] for processes that cannot be looked up.
    fn report_to_late_members(
        &self,
        mut listener: Listener,
        mut missing: Vec<usize>,
        report: &mut FailureReport,
    ) {
        let begin = Instant::now();
        let longest = match self.fault.is_raised() {
            false => CLOSE_TIMEOUT,
            // Ranks that have the reason as well, such as the death of a rank that they know, do not connect.
            true => UNSEEN_RANK_TIMEOUT,
        };
        let until = (begin + longest).min(self.deadline);
        let not_raised = Fault::new();
        while !self.has_aborted() {
            let now = Instant::now();
            let only_visible = now >= begin + UNSEEN_RANK_TIMEOUT;
            missing.retain(|&rank| self.may_connect(rank, only_visible));
            if missing.is_empty() || now >= until {
                return;
            }
            let limit = (now + LATE_MEMBER_POLL_INTERVAL).min(until);
            match listener.accept_until(self.config, limit, &not_raised) {
                Ok(Some(peer)) => {
                    missing.retain(|&rank| rank != peer.rank);
                    report.send(FramedStream::new(peer));
                }
                Ok(None) => {}
                // Either a rank of another version connected, which reports the reason itself, or the
                // socket failed. Other ranks may still connect.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
            report.drop_closed();
        }
    }

    fn has_aborted(&self) -> bool {
        let reason = self.fault.check().err();
        reason.is_some_and(|reason| reason.kind() == ErrorKind::Aborted)
    }

    fn may_connect(&self, rank: usize, only_visible: bool) -> bool {
        let (root, member) = (&self.members[0], &self.members[rank]);
        match root.state_of(member) {
            ProcessState::Ended(_) => false,
            _ => !only_visible || root.shares_process(member) || root.sees(member),
        }
    }
}

/// Connections on which a failure of init has been sent. They stay open until the other side closes
/// them. Closing first would reset a connection with unread bytes, and the report would be lost.
pub(super) struct FailureReport {
    body: Arc<Body>,
    streams: Vec<FramedStream>,
}

impl FailureReport {
    pub(super) fn new(reason: &Error) -> FailureReport {
        FailureReport {
            body: Body::new(reason.to_bytes()),
            streams: Vec::new(),
        }
    }

    pub(super) fn send(&mut self, mut stream: FramedStream) {
        stream.queue(ANNOUNCE, &self.body);
        flush_and_finish(&mut stream);
        self.streams.push(stream);
    }

    /// Drops the connections that the other side has closed.
    fn drop_closed(&mut self) {
        self.streams.retain_mut(|stream| {
            flush_and_finish(stream);
            stream.receive(&mut Vec::new()).is_none()
        });
    }

    /// Waits until the other sides have closed, at most [`HANG_UP_TIMEOUT`].
    pub(super) fn finish(mut self) {
        let until = Instant::now() + HANG_UP_TIMEOUT;
        loop {
            self.drop_closed();
            let now = Instant::now();
            if self.streams.is_empty() || now >= until {
                return;
            }
            let streams = self.streams.iter();
            let fds = streams.map(|stream| PollFd::new(stream.descriptor(), stream.events()));
            let limit = LATE_MEMBER_POLL_INTERVAL.min(until - now);
            poll_for(&mut fds.collect::<Vec<_>>(), limit);
        }
    }
}

/// Sends the queued frames, then the end of the stream.
fn flush_and_finish(stream: &mut FramedStream) {
    stream.flush();
    if stream.is_flushed() {
        stream.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::HEARTBEAT;
    use super::super::shared::SharedControl;
    use super::super::{connect_to_root, start};
    use super::*;
    use crate::bootstrap::address;
    use crate::bootstrap::auth::{ConnectionRole, PeerIdentity, wait_ready};
    use crate::bootstrap::warning_hook::WarningHook;
    use crate::config::Config;
    use crate::sys::fork::tests::{in_child, limit_descriptors};
    use crate::sys::socket;
    use nix::poll::PollFlags;
    use std::io::IoSliceMut;

    const OTHER_HOST: [u8; 16] = [9; 16];

    fn handshake(rank: usize) -> HandshakeConfig {
        let role = ConnectionRole::Control;
        let word = 0;
        HandshakeConfig::new(&[7; 32], PeerIdentity { role, rank, word })
    }

    /// Returns four ranks of this process, and the listener of rank 0.
    fn ranks() -> (Listener, Vec<RankEntry>) {
        let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
        let member = |rank| RankEntry::this(rank, at.ip(), &Config::default()).unwrap();
        let mut members: Vec<RankEntry> = (0..4).map(member).collect();
        members[0].control_port = at.port();
        (listener, members)
    }

    /// Makes `member` another process with our pid and another start time: one that has ended.
    fn kill(member: &mut RankEntry) {
        member.info.process_id = [0; 16];
        member.start_time += 1;
    }

    /// Connects to a failed root, and returns the error that the root sends.
    fn reported(root: &RankEntry, config: &HandshakeConfig, deadline: Instant) -> Error {
        let fault = Fault::new();
        let peer = connect_to_root(root, config, deadline, &fault).unwrap();
        let mut stream = FramedStream::new(peer);
        // The root has these bytes unread when it closes.
        stream.queue(HEARTBEAT, &Body::new(vec![0]));
        let report = stream.exchange(deadline, &fault).unwrap();
        assert_eq!(report.kind, ANNOUNCE);
        while !wait_ready(stream.descriptor(), PollFlags::POLLIN, HANG_UP_TIMEOUT) {
            assert!(Instant::now() < deadline);
        }
        let end = socket::read(stream.socket(), &mut [IoSliceMut::new(&mut [0])]);
        assert_eq!(end.unwrap(), 0, "the connection ends in good order");
        std::thread::sleep(Duration::from_millis(50));
        let reset = socket::connect_result(stream.socket());
        assert!(reset.is_ok(), "the root reads before it closes: {reset:?}");
        Error::from_bytes(&report.body).unwrap()
    }

    /// Rank 1 died after the rendezvous. Rank 2 connects when rank 0 gives up.
    #[test]
    fn members_of_a_root_that_gives_up_receive_the_error() {
        let (listener, mut members) = ranks();
        kill(&mut members[1]);
        let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            let accept = || accept_members(listener, &members, &handshake(0), deadline, &fault);
            let root = scope.spawn(accept);
            let received = [3, 2].map(|rank| reported(&members[0], &handshake(rank), deadline));
            let found = root.join().unwrap().unwrap_err();
            assert!(found.message().starts_with("rank 1 ("), "{found}");
            assert_eq!(received, [found.clone(), found]);
        });
    }

    /// The fault of rank 0 is raised because a rank has died that only some ranks know.
    #[test]
    fn member_of_a_root_that_knows_of_a_death_receives_it() {
        let (listener, members) = ranks();
        let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
        let died = Error::new(ErrorKind::Remote, "rank 5 died");
        fault.raise(died.clone());
        std::thread::scope(|scope| {
            let accept = || accept_members(listener, &members, &handshake(0), deadline, &fault);
            let root = scope.spawn(accept);
            let received = reported(&members[0], &handshake(2), deadline);
            assert_eq!(
                [root.join().unwrap().unwrap_err(), received],
                [died.clone(), died]
            );
        });
        let (listener, members) = ranks();
        let aborted = Fault::new();
        aborted.raise(Error::new(ErrorKind::Aborted, "enough"));
        let begun = Instant::now();
        accept_members(listener, &members, &handshake(0), deadline, &aborted).unwrap_err();
        assert!(begun.elapsed() < UNSEEN_RANK_TIMEOUT);
    }

    /// Rank 1 runs another version, which makes rank 0 give up. Rank 3 runs that version as well, and
    /// connects after rank 1.
    #[test]
    fn member_after_one_of_another_version_receives_the_error() {
        let (listener, members) = ranks();
        let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            let accept = || accept_members(listener, &members, &handshake(0), deadline, &fault);
            let root = scope.spawn(accept);
            for rank in [1, 3] {
                let other = handshake(rank).with_library([0, 0, 9]);
                let refused = connect_to_root(&members[0], &other, deadline, &fault).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Mismatch, "{refused}");
            }
            let received = reported(&members[0], &handshake(2), deadline);
            let found = root.join().unwrap().unwrap_err();
            assert!(found.message().starts_with("rank 1 at "), "{found}");
            assert_eq!(received, found);
        });
    }

    #[test]
    fn ended_or_invisible_members_are_not_awaited_long() {
        let (_, mut members) = ranks();
        kill(&mut members[1]);
        // A running process of this host, and a process of another host.
        members[2].info.process_id = [0; 16];
        members[3].info.process_id = [0; 16];
        members[3].info.host_id = OTHER_HOST;
        let root = MemberListener {
            members: &members,
            config: &handshake(0),
            deadline: Instant::now(),
            fault: &Fault::new(),
        };
        let awaited = |only_visible| [0, 1, 2, 3].map(|rank| root.may_connect(rank, only_visible));
        assert_eq!(awaited(false), [true, false, true, true]);
        assert_eq!(awaited(true), [true, false, true, false]);
    }

    /// Rank 0 has no descriptor to accept a connection. Its members fail when it gives up, before their deadline.
    #[test]
    fn root_that_cannot_accept_ends_the_waits_of_its_members() {
        let ended_early = in_child(|| {
            let (mut listener, mut members) = ranks();
            members.truncate(2);
            let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_millis(3900));
            std::thread::scope(|scope| {
                let connect = || connect_to_root(&members[0], &handshake(1), deadline, &fault);
                let member = scope.spawn(connect);
                listener.expect_connections(2);
                poll_for(
                    &mut listener.descriptors().collect::<Vec<_>>(),
                    Duration::from_secs(1),
                );
                limit_descriptors(3);
                let root = accept_members(listener, &members, &handshake(0), deadline, &fault);
                let lacks = root
                    .err()
                    .is_some_and(|e| e.message().contains("os error 24"));
                let error = member.join().unwrap().err();
                lacks && error.is_some_and(|error| error.kind() != ErrorKind::Timeout)
            })
        });
        assert!(ended_early);
    }

    /// Rank 0 runs out of descriptors after it has accepted all connections. All ranks receive the
    /// error.
    #[test]
    fn root_without_descriptors_reports_it() {
        let reported_everywhere = in_child(|| {
            let (listener, mut members) = ranks();
            members.truncate(2);
            let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(10));
            std::thread::scope(|scope| {
                let member = scope.spawn(|| reported(&members[0], &handshake(1), deadline));
                let peers = accept_members(listener, &members, &handshake(0), deadline, &fault);
                limit_descriptors(3);
                let config = Config::default();
                let started = start(0, members.clone(), peers.unwrap(), |members| {
                    SharedControl::new(0, members, fault.clone(), &config, WarningHook::log())
                });
                let error = started.map(drop).unwrap_err();
                let received = member.join().unwrap();
                let lacks = |error: &Error| error.message().contains("os error 24");
                lacks(&error) && lacks(&received) && received.message().starts_with("rank 0 (")
            })
        });
        assert!(reported_everywhere);
    }
}
