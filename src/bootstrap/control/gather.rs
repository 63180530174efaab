//! The control connections of all other ranks come to rank 0, or hear why it gives up.

use super::*;
use crate::bootstrap::auth::poll_for;
use nix::poll::PollFd;

/// How long a hub that gives up waits for ranks of which it knows nothing: they have not come, and
/// no process of theirs can be looked up.
const UNSEEN: Duration = Duration::from_millis(300);
/// How long ranks that were told may take to hang up.
const LINGER: Duration = Duration::from_millis(300);
/// How often a hub that gives up looks at who is still to come.
const SLICE: Duration = Duration::from_millis(20);

/// Accepts the control connections of all other ranks. They are told why that fails, and so are
/// those who come soon after it, before the deadline and the fault: see [`tell_late_comers`].
pub(super) fn gather_leaves(
    mut listener: Listener,
    members: &[RankEntry],
    terms: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> Result<Vec<(usize, Peer)>> {
    let mut leaves: Vec<Option<Peer>> = members.iter().map(|_| None).collect();
    let mut missing = members.len() - 1;
    let result = loop {
        if missing == 0 {
            break Ok(());
        }
        // Short slices: a rank that dies here would be waited for until the deadline.
        let slice = (Instant::now() + Duration::from_millis(200)).min(deadline);
        match listener.accept_until(terms, slice, fault) {
            Ok(Some(peer)) => match leaves.get_mut(peer.rank) {
                Some(place @ None) if peer.rank != 0 => {
                    *place = Some(peer);
                    missing -= 1;
                }
                _ => {}
            },
            Ok(None) => {
                let absent = || (1..members.len()).filter(|&rank| leaves[rank].is_none());
                let dead = absent().find_map(|rank| {
                    let member = &members[rank];
                    match look(&members[0], member) {
                        Fate::Dead(why) => Some(format!("{} died: {why}", member.info)),
                        _ => None,
                    }
                });
                if let Some(dead) = dead {
                    break Err(Error::new(ErrorKind::Remote, dead));
                }
                if Instant::now() >= deadline {
                    let names: Vec<String> = absent()
                        .take(8)
                        .map(|rank| members[rank].info.to_string())
                        .collect();
                    break Err(Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "{missing} ranks opened no control connection in time, among them {}",
                            names.join(", ")
                        ),
                    ));
                }
            }
            Err(error) => break Err(error),
        }
    };
    let Err(error) = result else {
        let leaves = leaves.into_iter().enumerate();
        return Ok(leaves
            .filter_map(|(rank, peer)| Some((rank, peer?)))
            .collect());
    };
    // Those who came would see only that we are gone, and those about to come not even that.
    let mut told = Told::new(&error);
    let awaited = (1..members.len()).filter(|&rank| leaves[rank].is_none());
    let mut awaited: Vec<usize> = awaited.collect();
    leaves
        .into_iter()
        .flatten()
        .for_each(|peer| told.tell(peer));
    let hub = Gathering {
        members,
        terms,
        deadline,
        fault,
    };
    hub.tell_late_comers(listener, &mut awaited, &mut told);
    told.hang_up();
    Err(error)
}

/// What a hub that gives up knows.
struct Gathering<'a> {
    members: &'a [RankEntry],
    terms: &'a HandshakeConfig,
    deadline: Instant,
    fault: &'a Fault,
}

impl Gathering<'_> {
    /// Waits for `awaited` ranks as long as they may come: those that live within [`CLOSE_TIMEOUT`],
    /// those that cannot be looked up within [`UNSEEN`].
    fn tell_late_comers(&self, mut listener: Listener, awaited: &mut Vec<usize>, told: &mut Told) {
        let begin = Instant::now();
        let until = (begin + CLOSE_TIMEOUT).min(self.deadline);
        loop {
            let now = Instant::now();
            let blind = now >= begin + UNSEEN;
            awaited.retain(|&rank| self.may_come(rank, blind));
            if awaited.is_empty() || now >= until {
                return;
            }
            let slice = (now + SLICE).min(until);
            match listener.accept_until(self.terms, slice, self.fault) {
                Ok(Some(peer)) => {
                    awaited.retain(|&rank| rank != peer.rank);
                    told.tell(peer);
                }
                Ok(None) => {}
                Err(_) if self.fault.check().is_err() => return,
                // One that is refused knows why: the others are still to come. Or the socket fails.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
            told.listen();
        }
    }

    fn may_come(&self, rank: usize, blind: bool) -> bool {
        let (me, member) = (&self.members[0], &self.members[rank]);
        match look(me, member) {
            Fate::Dead(_) => false,
            _ => !blind || is_this_process(me, member) || is_visible(me, member),
        }
    }
}

/// Ranks that were told why there will be no communicator. To close a connection at once that has
/// bytes of theirs to be read would reset it, and what is on its way would be lost.
pub(super) struct Told {
    body: Arc<Body>,
    channels: Vec<FramedStream>,
}

impl Told {
    pub(super) fn new(reason: &Error) -> Told {
        Told {
            body: Body::new(write_error(reason)),
            channels: Vec::new(),
        }
    }

    fn tell(&mut self, peer: Peer) {
        self.tell_on(FramedStream::new(peer));
    }

    pub(super) fn tell_on(&mut self, mut channel: FramedStream) {
        channel.queue(control_thread::ANNOUNCE, &self.body);
        send(&mut channel);
        self.channels.push(channel);
    }

    /// Drops the connections that the other side has closed.
    fn listen(&mut self) {
        self.channels.retain_mut(|channel| {
            send(channel);
            channel.receive(&mut Vec::new()).is_none()
        });
    }

    /// Returns when the others have hung up, [`LINGER`] later at the latest.
    pub(super) fn hang_up(mut self) {
        let until = Instant::now() + LINGER;
        loop {
            self.listen();
            let now = Instant::now();
            if self.channels.is_empty() || now >= until {
                return;
            }
            let channels = self.channels.iter();
            let fds = channels.map(|channel| PollFd::new(channel.descriptor(), channel.events()));
            poll_for(&mut fds.collect::<Vec<_>>(), SLICE.min(until - now));
        }
    }
}

/// Sends what is queued, after which nothing comes.
fn send(channel: &mut FramedStream) {
    channel.flush();
    if channel.is_flushed() {
        channel.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::auth::wait_ready;
    use crate::sys::fork::tests::in_child;
    use crate::sys::fork::tests::limit_descriptors;
    use crate::sys::socket;
    use nix::poll::PollFlags;
    use std::io::IoSliceMut;

    const FAR: [u8; 16] = [9; 16];

    fn terms(rank: usize) -> HandshakeConfig {
        let role = Role::Control;
        let word = 0;
        HandshakeConfig::new(&[7; 32], PeerIdentity { role, rank, word })
    }

    /// Four ranks of this process, and where rank 0 listens.
    fn ranks() -> (Listener, Vec<RankEntry>) {
        let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
        let member = |rank| RankEntry::this(rank, at.ip(), &Config::default()).unwrap();
        let mut members: Vec<RankEntry> = (0..4).map(member).collect();
        members[0].control_port = at.port();
        (listener, members)
    }

    /// Makes `member` a process that is not this one, of our pid, that has begun at another time.
    fn kill(member: &mut RankEntry) {
        member.info.process_id = [0; 16];
        member.start_time += 1;
    }

    /// Goes to a hub that gives up, and returns why it did.
    fn hear(hub: &RankEntry, terms: &HandshakeConfig, deadline: Instant) -> Error {
        let fault = Fault::new();
        let peer = reach_hub(hub, terms, deadline, &fault).unwrap();
        let mut channel = FramedStream::new(peer);
        // What it sends is not read before it is told.
        channel.queue(control_thread::BEAT, &Body::new(vec![0]));
        let told = channel.exchange(deadline, &fault).unwrap();
        assert_eq!(told.kind, control_thread::ANNOUNCE);
        while !wait_ready(channel.descriptor(), PollFlags::POLLIN, LINGER) {
            assert!(Instant::now() < deadline);
        }
        let end = socket::read(channel.socket(), &mut [IoSliceMut::new(&mut [0])]);
        assert_eq!(end.unwrap(), 0, "the connection ends in good order");
        std::thread::sleep(Duration::from_millis(50));
        let reset = socket::outcome(channel.socket());
        assert!(reset.is_ok(), "the root reads what it was sent: {reset:?}");
        crate::bootstrap::wire::read_error(&told.body).unwrap()
    }

    /// Rank 1 died after the meeting. Rank 2 is on its way when rank 0 gives up.
    #[test]
    fn who_comes_to_a_hub_that_gives_up_hears_why() {
        let (listener, mut members) = ranks();
        kill(&mut members[1]);
        let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            let gather = || gather_leaves(listener, &members, &terms(0), deadline, &fault);
            let hub = scope.spawn(gather);
            let told = [3, 2].map(|rank| hear(&members[0], &terms(rank), deadline));
            let found = hub.join().unwrap().unwrap_err();
            assert!(found.message().starts_with("rank 1 ("), "{found}");
            assert_eq!(told, [found.clone(), found]);
        });
    }

    /// The first rank of another version is why it gives up, the second comes meanwhile.
    #[test]
    fn who_comes_after_one_that_is_refused_hears_why() {
        let (listener, members) = ranks();
        let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
        std::thread::scope(|scope| {
            let gather = || gather_leaves(listener, &members, &terms(0), deadline, &fault);
            let hub = scope.spawn(gather);
            for rank in [1, 3] {
                let terms = terms(rank).with_library([0, 0, 9]);
                let refused = reach_hub(&members[0], &terms, deadline, &fault).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Mismatch, "{refused}");
            }
            let told = hear(&members[0], &terms(2), deadline);
            let found = hub.join().unwrap().unwrap_err();
            assert!(found.message().starts_with("rank 1 at "), "{found}");
            assert_eq!(told, found);
        });
    }

    #[test]
    fn those_who_are_dead_or_out_of_sight_are_not_waited_for_long() {
        let (_, mut members) = ranks();
        kill(&mut members[1]);
        // A process that lives, of this host and of another one.
        members[2].info.process_id = [0; 16];
        members[3].info.process_id = [0; 16];
        members[3].info.host_id = FAR;
        let hub = Gathering {
            members: &members,
            terms: &terms(0),
            deadline: Instant::now(),
            fault: &Fault::new(),
        };
        let awaited = |blind| [0, 1, 2, 3].map(|rank| hub.may_come(rank, blind));
        assert_eq!(awaited(false), [true, false, true, true]);
        assert_eq!(awaited(true), [true, false, true, false]);
    }

    /// Rank 0 has all connections, and then no descriptors left.
    #[test]
    fn a_hub_that_lacks_descriptors_says_so() {
        let said = in_child(|| {
            let (listener, mut members) = ranks();
            members.truncate(2);
            let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(10));
            std::thread::scope(|scope| {
                let leaf = scope.spawn(|| hear(&members[0], &terms(1), deadline));
                let links = gather_leaves(listener, &members, &terms(0), deadline, &fault);
                limit_descriptors(3);
                let config = Config::default();
                let begun = begin(0, members.clone(), links.unwrap(), |members| {
                    Shared::new(0, members, fault.clone(), &config, WarningHook::log())
                });
                let error = begun.map(drop).unwrap_err();
                let told = leaf.join().unwrap();
                let lacks = |error: &Error| error.message().contains("os error 24");
                lacks(&error) && lacks(&told) && told.message().starts_with("rank 0 (")
            })
        });
        assert!(said);
    }
}
