//! Arguments, ids and settings that do not fit each other when a communicator grows. The ranks are threads.

use crate::support::{config, world};
use cinch::types::TransportKind;
use cinch::{Communicator, Config, Error, ErrorKind, UniqueId};
use sha2::{Digest, Sha256};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Runs two ranks, of which rank 0 makes an id and hands it to `new_rank` on a third thread. Returns the
/// results of the ranks and of the new rank.
fn grow_by<R: Send>(
    old_rank: impl Fn(&Communicator, usize) -> R + Sync,
    new_rank: impl FnOnce(UniqueId) -> R + Send,
) -> (Vec<R>, R) {
    let (give, take) = channel();
    let give = Mutex::new(give);
    std::thread::scope(|scope| {
        let new = scope.spawn(move || new_rank(take.recv().expect("an id")));
        let old = world(2, &config(TransportKind::Shm), |comm| {
            if comm.rank() == 0 {
                let id = comm.grow_id().expect("an id");
                give.lock().unwrap().send(id).expect("a new rank");
            }
            comm.barrier().expect("both call");
            let made = old_rank(&comm, comm.rank());
            // A failed grow leaves the communicator usable.
            comm.barrier().expect("both call");
            made
        });
        (old, new.join().expect("a new rank"))
    })
}

fn expect_error(made: Result<Communicator, Error>, kind: ErrorKind, words: &[&str]) {
    let error = made.expect_err("no communicator");
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.message().contains(word), "\"{word}\": {error}");
    }
}

#[test]
fn impossible_numbers_are_refused_before_anything_moves() {
    use ErrorKind::InvalidArgument;
    let shm = || config(TransportKind::Shm);
    grow_by(
        |comm, _| {
            for nranks in [0, 1, 2, 4097] {
                let words = [
                    &format!("2 ranks cannot grow to {nranks}")[..],
                    "at most 4096",
                ];
                expect_error(comm.grow(nranks, shm()), InvalidArgument, &words);
            }
        },
        |id| {
            for (rank, nranks, words) in [
                (
                    1,
                    3,
                    "rank 1 cannot join a communicator that grows from 2 to 3 ranks",
                ),
                (3, 3, "its new ranks are 2 to 2"),
                (2, 2, "2 ranks cannot grow to 2"),
                (2, 4097, "2 ranks cannot grow to 4097"),
            ] {
                let made = Communicator::init(&id, rank, nranks, shm());
                expect_error(made, InvalidArgument, &[words]);
            }
        },
    );
}

#[test]
fn ranks_that_disagree_about_a_grow_get_both_numbers() {
    let shm = || config(TransportKind::Shm);
    world(2, &shm(), |comm| {
        let nothing = comm.grow(3, shm());
        expect_error(
            nothing,
            ErrorKind::InvalidUsage,
            &["none of the 2 ranks has made an id"],
        );
        comm.grow_id().expect("an id");
        let words = ["rank 0 (", "rank 1 (", "different ids for new ranks"];
        expect_error(comm.grow(3, shm()), ErrorKind::Mismatch, &words);
        let words = ["grows the communicator to 3 ranks", "rank 1 (", "to 4"];
        expect_error(
            comm.grow(3 + comm.rank(), shm()),
            ErrorKind::Mismatch,
            &words,
        );
        comm.barrier().expect("the communicator is usable");
        match comm.rank() {
            0 => drop(comm.split(Some(0), 0).expect_err("not all split")),
            _ => {
                let words = ["rank 1 (", "calls grow and rank 0 (", "does not"];
                expect_error(comm.grow(3, shm()), ErrorKind::Mismatch, &words);
            }
        }
    });
}

#[test]
fn number_of_the_new_rank_must_be_that_of_the_others() {
    let shm = || config(TransportKind::Shm);
    let (old, new) = grow_by(
        |comm, _| comm.grow(4, shm()),
        |id| Communicator::init(&id, 2, 3, shm()),
    );
    for made in old.into_iter().chain([new]) {
        expect_error(made, ErrorKind::Mismatch, &["of 3", "of 4", "rank 2 ("]);
    }
}

#[test]
fn settings_of_the_new_rank_must_be_those_of_the_others() {
    let shm = || config(TransportKind::Shm);
    let (old, new) = grow_by(
        |comm, _| comm.grow(3, shm()),
        |id| {
            let config = Config { slots: 8, ..shm() };
            Communicator::init(&id, 2, 3, config)
        },
    );
    for made in old.into_iter().chain([new]) {
        let words = ["CINCH_SLOTS is 4 on rank 0 (", "8 on rank 2 ("];
        expect_error(made, ErrorKind::Mismatch, &words);
    }
}

/// Nobody comes within the timeout of the ranks; the next try succeeds.
#[test]
fn new_rank_that_does_not_come_is_named_and_can_come_later() {
    let timeout = Duration::from_millis(700);
    let short = Config {
        init_timeout: timeout,
        ..config(TransportKind::Shm)
    };
    let (give, take) = channel();
    let give = Mutex::new(give);
    std::thread::scope(|scope| {
        let late = scope.spawn(move || {
            let id = take.recv().expect("an id");
            Communicator::init(&id, 3, 4, config(TransportKind::Shm)).expect("four ranks")
        });
        let grown = world(3, &config(TransportKind::Shm), |comm| {
            if comm.rank() == 1 {
                comm.grow_id().expect("an id");
            }
            let begun = Instant::now();
            let words = ["rank 3 of 4 did not come", "0.7 s (CINCH_INIT_TIMEOUT)"];
            expect_error(comm.grow(4, short.clone()), ErrorKind::Timeout, &words);
            assert!(begun.elapsed() < timeout + Duration::from_secs(1));
            let mut sum = [1i64];
            comm.all_reduce_in_place(&mut sum, cinch::ReduceOp::Sum)
                .expect("the communicator is usable");
            assert_eq!(sum, [3]);
            if comm.rank() == 2 {
                let id = comm.grow_id().expect("another id");
                give.lock().unwrap().send(id).expect("a new rank");
            }
            comm.grow(4, config(TransportKind::Shm))
                .expect("four ranks")
        });
        assert_eq!(grown.len(), 3);
        assert_eq!(late.join().expect("a rank").nranks(), 4);
    });
}

/// Returns `id` with another secret and the right checksum.
fn with_another_secret(id: &UniqueId) -> UniqueId {
    let mut bytes = *id.as_bytes();
    bytes[4..36].fill(0x5a);
    let hash = Sha256::new()
        .chain_update(b"cinch id")
        .chain_update(&bytes[..112])
        .finalize();
    bytes[112..].copy_from_slice(&hash[..16]);
    UniqueId::from_bytes(&bytes).expect("a well-formed id")
}

#[test]
fn rank_without_the_secret_is_refused_and_hinders_nobody() {
    let shm = || config(TransportKind::Shm);
    let (old, new) = grow_by(
        |comm, _| comm.grow(3, shm()),
        |id| {
            let forged = with_another_secret(&id);
            for _ in 0..20 {
                let begun = Instant::now();
                let made = Communicator::init(&forged, 2, 3, shm());
                expect_error(made, ErrorKind::Remote, &["holds another secret"]);
                assert!(begun.elapsed() < Duration::from_secs(2));
            }
            Communicator::init(&id, 2, 3, shm())
        },
    );
    for made in old.into_iter().chain([new]) {
        assert_eq!(made.expect("three ranks").nranks(), 3);
    }
}

/// An id serves one grow: a process that comes later finds nobody.
#[test]
fn used_id_is_refused() {
    let shm = || config(TransportKind::Shm);
    let (old, (new, again)) = grow_by(
        |comm, _| (comm.grow(3, shm()), None),
        |id| {
            let new = Communicator::init(&id, 2, 3, shm());
            (new, Some(Communicator::init(&id, 2, 3, shm())))
        },
    );
    assert!(new.is_ok() && old.iter().all(|(made, _)| made.is_ok()));
    let words = ["may be used up", "rank 0, which created it, has ended"];
    expect_error(again.expect("a second try"), ErrorKind::Remote, &words);
}
