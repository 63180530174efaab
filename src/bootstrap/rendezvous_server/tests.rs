//! Tests of [`super`]: deadlines, bounds, and ranks that give up.

use super::*;
use crate::bootstrap::address;
use crate::bootstrap::auth::{OnRefusal, connect_to_any};
use crate::bootstrap::id::{assemble, assemble_reconnect};
use crate::bootstrap::join;
use crate::config::Config;
use crate::sync::Fault;

/// Connects as `rank`, registers `pause` later with 1 s left, and returns the server's answer with
/// the seconds from the registration to it.
fn answer(id: &UniqueId, (rank, nranks): (usize, u32), pause: f64) -> (Frame, f64) {
    let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
    let own = handshake(id, rank);
    let peer = connect_to_any(&id.addresses(), &own, OnRefusal::Fail, deadline, &fault);
    let mut stream = FramedStream::new(peer.unwrap());
    std::thread::sleep(Duration::from_secs_f64(pause));
    let sent = Instant::now();
    let mut writer = Writer::default();
    writer.u32(nranks).u64(1000).u64(3500).u32(0);
    let entry = RankEntry::this(rank, address::for_one_host(), &Config::default());
    entry.unwrap().write(&mut writer);
    stream.queue(REGISTER, &Body::new(writer.0));
    let answer = stream.exchange(deadline, &fault).unwrap();
    (answer, sent.elapsed().as_secs_f64())
}

/// A rank is stopped for 0.6 s between its handshake and its registration, and can then wait for
/// 1 s. The server gives up a tenth of that earlier, not 0.6 s.
#[test]
fn time_before_the_registration_counts_once() {
    let id = UniqueId::create_for_one_host(&Config::default()).unwrap();
    let (answer, waited) = answer(&id, (1, 4), 0.6);
    assert_eq!(answer.kind, REFUSED);
    let error = Error::from_bytes(&answer.body).unwrap();
    let words = "ranks 0, 2, 3 of 4 did not come to the rendezvous within 3.5 s";
    assert!(error.message().contains(words), "{error}");
    // The server looks for frames at least every 50 ms.
    assert!(waited >= 0.8, "gave up after {waited:.3} s");
}

/// Peers prove that they hold the secret, and never register. The server drops the oldest of them beyond its
/// bound, and ranks still join.
#[test]
fn proven_connections_that_never_register_are_bounded() {
    const EXCESS: usize = 20;
    let bound = 2 + SPARE_REGISTRANTS;
    let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
    let id = assemble(0, &[1; 32], &[5; 16], &[at]);
    let mut server = RendezvousServer::new(&id, listener, Duration::from_secs(20), None);
    let answers = std::thread::scope(|scope| {
        let join = |rank| {
            let id = &id;
            scope.spawn(move || answer(id, (rank, 2), 0.0).0.kind)
        };
        let first = join(0);
        while server.entries().next().is_none() {
            server.poll();
        }
        let connecting = scope.spawn(|| {
            let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
            let connect = |_| {
                let own = handshake(&id, 1);
                connect_to_any(&[at], &own, OnRefusal::Fail, deadline, &fault).unwrap()
            };
            let connected = (0..bound + EXCESS).map(connect).map(FramedStream::new);
            connected.collect::<Vec<_>>()
        });
        while !connecting.is_finished() {
            server.poll();
        }
        let mut idle = connecting.join().unwrap();
        // The server may not have accepted the last connections yet.
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            server.poll();
        }
        assert_eq!(server.registrants.len(), 1 + bound);
        for (at, stream) in idle.iter_mut().enumerate() {
            let has_ended = stream.receive(&mut Vec::new()).is_some();
            assert_eq!(has_ended, at < EXCESS, "connection {at}");
        }
        let second = join(1);
        while server.entries().count() < 2 {
            server.poll();
        }
        server.advance();
        [first, second].map(|rank| rank.join().unwrap())
    });
    assert_eq!(answers, [TABLE, TABLE]);
    server.discard();
}

/// The server finds the last registration and the deadline past at once, as after a stop.
#[test]
fn rendezvous_with_all_ranks_completes_after_its_deadline() {
    let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
    let id = assemble(0, &[1; 32], &[3; 16], &[at]);
    let mut server = RendezvousServer::new(&id, listener, Duration::from_secs(20), None);
    let answer = std::thread::scope(|scope| {
        let rank = scope.spawn(|| answer(&id, (0, 1), 0.0));
        while server.entries().next().is_none() {
            server.poll();
        }
        server.deadline = Instant::now();
        server.advance();
        rank.join().unwrap().0
    });
    assert_eq!(answer.kind, TABLE);
    server.discard();
}

/// Ranks 0 to 3 reconnect without rank 4, after an attempt with it. Rank 3, still in that attempt,
/// finds the server of the later one and gives up.
#[test]
fn rank_that_gives_up_an_earlier_attempt_fails_no_later_one() {
    let (listener, at) = Listener::bind(address::for_one_host()).unwrap();
    let key = [1; 32];
    let [earlier, later] =
        [&[0, 1, 2, 3, 4][..], &[0, 1, 2, 3]].map(|members| assemble_reconnect(&key, at, members));
    let mut server = RendezvousServer::new(&later, listener, Duration::from_secs(20), None);
    let reason = Error::new(ErrorKind::Remote, "rank 4 ended");
    let mut give_up = |id: &UniqueId| {
        let connected = std::thread::scope(|scope| {
            let rank = scope.spawn(|| {
                let (fault, deadline) = (Fault::new(), Instant::now() + Duration::from_secs(20));
                let own = handshake(id, 3);
                let peer = connect_to_any(&[at], &own, OnRefusal::Fail, deadline, &fault);
                let mut stream = FramedStream::new(peer.unwrap());
                join::give_up(&mut stream, id, "rank 3", &reason);
                stream
            });
            while !rank.is_finished() {
                server.poll();
            }
            rank.join().unwrap()
        });
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            server.poll();
        }
        drop(connected);
        server.failure.clone()
    };
    assert_eq!(give_up(&earlier), None);
    let failure = give_up(&later).unwrap();
    assert_eq!(failure.message(), "rank 3: rank 4 ended");
    server.discard();
}
