//! Records all bytes that rank processes send on sockets. No unique id and no secret may be among those of init, splits,
//! a shrink and a grow, and with encryption no payload and no error. The unit test `wire_tests` looks for every derived key in the same way.

use super::rank_group::{self, RankGroup, say};
use crate::support::config;
use cinch::types::TransportKind;
use cinch::{Communicator, Config, ReduceOp, UniqueId};
use std::path::{Path, PathBuf};
use std::process::Command;

const RANKS: usize = 4;
const SPLITS: usize = 5;
/// Place of the secret in a unique id.
const SECRET: std::ops::Range<usize> = 4..36;
/// First bytes of each handshake, which show that the record is complete.
const MAGIC: &[u8] = b"cinch\x01\r\n";
const PAYLOAD: &[u8] = b"a payload that nobody else must read";

/// Builds the library that records, and returns its path.
fn recorder() -> PathBuf {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("record_sends.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/record_sends.c");
    let built = Command::new("gcc")
        .args([
            "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o",
        ])
        .args([&library, &source])
        .status();
    assert!(built.expect("gcc").success());
    library
}

fn count(bytes: &[u8], part: &[u8]) -> usize {
    bytes
        .windows(part.len())
        .filter(|window| *window == part)
        .count()
}

/// Runs ranks that do `what` until those of `ends` are done. Returns the ids of their communicators, and the bytes
/// that they sent. With `grows` a further process joins by the id that rank 1 makes.
fn record(what: &str, ends: &[usize], grows: bool) -> (Vec<UniqueId>, Vec<u8>) {
    let record = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("record-{what}-{}", std::process::id()));
    let variables = [
        ("LD_PRELOAD", recorder()),
        ("CINCH_TEST_RECORD", record.clone()),
    ];
    let tasks: Vec<String> = (0..RANKS).map(|rank| format!("{what} {rank}")).collect();
    let mut ranks = RankGroup::start_with("wire", &tasks, &variables);
    let mut ids = vec![ranks.hand_on_id()];
    let mut ends = ends.to_vec();
    if grows {
        ids.push(ranks.wait_for("grow-id", &[1]).swap_remove(1));
        let new = ranks.add("wire", &format!("new {}", RANKS - 1), &variables);
        ranks.hand(new, &ids[1]);
        ends.push(new);
    }
    ranks.wait_for("done", &ends);
    let bytes = std::fs::read(&record).expect("a record");
    std::fs::remove_file(&record).expect("a record");
    let ids = ids.iter().map(|id| UniqueId::from_hex(id).expect("an id"));
    (ids.collect(), bytes)
}

/// With encryption neither the payload nor the error by which the root names a dead rank is on the wire. The
/// search finds both without encryption.
#[test]
fn payload_and_control_are_private_with_encryption() {
    for (what, encrypts) in [("open", false), ("private", true)] {
        let (_, bytes) = record(what, &[0, 1, 2], false);
        let found = [PAYLOAD, b"rank 3 (host "].map(|mark| count(&bytes, mark));
        println!("{what}: {found:?} in {} bytes", bytes.len());
        assert!(count(&bytes, MAGIC) >= 2 * RANKS && bytes.len() > RANKS * 4096);
        match encrypts {
            true => assert_eq!(found, [0, 0]),
            false => assert!(found.iter().all(|&found| found >= RANKS - 2)),
        }
    }
}

#[test]
fn no_id_and_no_secret_is_sent_by_init_split_shrink_and_grow() {
    let (ids, bytes) = record("communicators", &[1, 2, 3], true);
    let handshakes = count(&bytes, MAGIC);
    println!("{} bytes with {handshakes} hellos", bytes.len());
    // Each rank opens a rendezvous connection for each of its communicators, and both ends send a hello.
    assert!(
        handshakes >= 2 * RANKS * (2 + SPLITS),
        "{handshakes} hellos"
    );
    for id in &ids {
        let secret = &id.as_bytes()[SECRET];
        let found = count(&bytes, &secret[..16]) + count(&bytes, &secret[16..]);
        assert_eq!(found, 0);
    }
    let sent = bytes
        .windows(128)
        .filter(|window| UniqueId::from_slice(window).is_ok());
    assert_eq!(sent.count(), 0, "unique ids on the wire");
    // The search finds an id between other bytes.
    let leak = [&bytes[..200], ids[0].as_bytes(), &bytes[..200]].concat();
    let found = leak
        .windows(128)
        .filter(|window| UniqueId::from_slice(window).is_ok());
    assert_eq!(found.count(), 1);
}

pub fn rank_process(task: &str) {
    let (what, rank) = task.split_once(' ').expect("a task and a rank");
    let rank = rank.parse().expect("a rank");
    match what {
        "communicators" => communicators(rank),
        "new" => new_rank(rank),
        _ => payloads(rank, what == "private"),
    }
}

/// Gathers a payload, and reports the error that names rank 3, which exits.
fn payloads(rank: usize, encrypts: bool) {
    rank_group::run(|| {
        let config = Config {
            encrypts,
            ..config(TransportKind::Tcp)
        };
        let id = rank_group::receive_id(rank, &config)?;
        let comm = Communicator::init(&id, rank, RANKS, config)?;
        let mut part = [0; 4096];
        part[..PAYLOAD.len()].copy_from_slice(PAYLOAD);
        let mut all = [0; RANKS * 4096];
        comm.all_gather(&part, &mut all)?;
        assert!(all.chunks(part.len()).all(|one| one == part));
        if rank == 3 {
            std::process::exit(0);
        }
        let error = comm.barrier().expect_err("rank 3 is gone");
        assert!(error.message().contains("rank 3 (host "), "{error}");
        say("done ");
        Ok(())
    });
}

fn sums(comm: &Communicator, right: i64) -> Result<(), cinch::Error> {
    let mut sum = [1i64];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [right]);
    Ok(())
}

/// Joins, splits in two colours, shrinks by rank 0, which leaves, and grows by a new rank.
fn communicators(rank: usize) {
    rank_group::run(|| {
        let config = config(TransportKind::Tcp);
        let id = rank_group::receive_id(rank, &config)?;
        let comm = Communicator::init(&id, rank, RANKS, config.clone())?;
        for _ in 0..SPLITS {
            let part = comm.split(Some((rank % 2) as u32), 0)?.ok_or("no part")?;
            sums(&part, 2)?;
            part.finalize()?;
        }
        comm.prepare_to_shrink()?;
        if rank == 0 {
            return Ok(());
        }
        let rest = comm.shrink(&[], config.clone())?;
        sums(&rest, 3)?;
        if rank == 1 {
            say(&format!("grow-id {}", rest.grow_id()?.to_hex()));
        }
        let grown = rest.grow(RANKS, config)?;
        sums(&grown, 4)?;
        grown.finalize()?;
        say("done ");
        Ok(())
    });
}

fn new_rank(rank: usize) {
    rank_group::run(|| {
        let id = UniqueId::from_hex(&rank_group::receive_line()?)?;
        let grown = Communicator::init(&id, rank, RANKS, config(TransportKind::Tcp))?;
        sums(&grown, 4)?;
        grown.finalize()?;
        say("done ");
        Ok(())
    });
}
