//! Tests programs such as data loaders, which fork while they hold communicators. A forked child
//! must neither keep a dead rank's connections open, nor disturb the ranks that run.
#![allow(unsafe_code)] // fork

use super::child;
use crate::support;
use cinch::capi::core::handle_table::HandleTable;
use cinch::types::TransportKind;
use cinch::{Communicator, Config, ErrorKind, ReduceOp, UniqueId};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time within which a rank on another host must report the death of a rank, although the dead
/// rank's forked child still runs.
const REPORT_LIMIT: Duration = Duration::from_secs(2);
/// Time within which every call of a child on an inherited communicator must fail. It is shorter
/// than any timeout for another rank. It is long enough on a machine whose cores are busy with
/// other tests.
const CHILD_LIMIT: Duration = Duration::from_secs(5);
/// Seconds after which the processes of these tests are ended by an alarm.
const LIFETIME: u32 = 60;

/// Joins under a host id of its own, so that other ranks cannot check this process in /proc.
fn join(id: &UniqueId, rank: usize) -> Communicator {
    let config = Config {
        host_id: Some(format!("host {rank}")),
        ..support::config(TransportKind::Tcp)
    };
    Communicator::init(id, rank, 2, config).unwrap()
}

fn add(comm: &Communicator) -> cinch::Result<()> {
    let mut data = [1u64; 1000];
    comm.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
    assert_eq!(data, [2; 1000]);
    Ok(())
}

/// Runs `body` in a child, and returns its pid.
fn fork(body: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: the child runs `body`, then `_exit`, so it never returns to the test harness.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(LIFETIME);
                libc::_exit(body())
            }
            child => {
                assert!(child > 0);
                child
            }
        }
    }
}

/// Runs rank 1 of `killed_rank_is_reported_while_its_forked_child_lives` in its own process.
pub fn rank_process(id: &str) {
    // SAFETY: `alarm` sets a timer of this process and touches no memory.
    unsafe { libc::alarm(LIFETIME) };
    let comm = join(&UniqueId::from_hex(id).unwrap(), 1);
    add(&comm).unwrap();
    let worker = fork(|| {
        std::thread::sleep(Duration::from_secs(LIFETIME.into()));
        0
    });
    println!("worker {worker}");
    std::thread::sleep(Duration::from_secs(LIFETIME.into()));
}

#[test]
fn killed_rank_is_reported_while_its_forked_child_lives() {
    let id = UniqueId::create(&support::config(TransportKind::Tcp)).unwrap();
    let mut process = child::rank(&[], "fork", &id.to_hex())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let comm = join(&id, 0);
    add(&comm).unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let worker: libc::pid_t = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("worker ")?.1.parse().ok())
        .unwrap();

    process.kill().unwrap();
    let killed = Instant::now();
    let error = add(&comm).unwrap_err();
    let took = killed.elapsed();
    // SAFETY: `kill` touches no memory. `worker` is the child of a rank that this test started;
    // signal 0 only checks that it exists.
    let lived = unsafe { libc::kill(worker, 0) == 0 && libc::kill(worker, libc::SIGKILL) == 0 };
    process.wait().unwrap();
    assert!(lived, "the worker outlives its rank");
    assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
    assert!(error.message().contains("rank 1 (host "), "{error}");
    assert!(took <= REPORT_LIMIT, "known after {took:?}: {error}");
    println!("known after {took:?}: {error}");
}

/// Makes calls on a communicator that this child inherited. Returns an exit status: 0 if all calls
/// failed in time.
fn use_inherited(comm: Communicator) -> i32 {
    let begin = Instant::now();
    let refused = |result: cinch::Result<()>| {
        result.is_err_and(|error| {
            error.kind() == ErrorKind::InvalidUsage && error.message().contains("forked")
        })
    };
    let calls = refused(add(&comm))
        && refused(comm.finalize())
        && refused(comm.split(Some(0), 0).map(drop))
        && refused(comm.async_error().map_or(Ok(()), Err));
    comm.abort();
    drop(comm);
    i32::from(!calls) + 2 * i32::from(begin.elapsed() > CHILD_LIMIT)
}

/// Both ranks fork after each call, sometimes while the other rank already waits in its next call.
#[test]
fn calls_of_forked_children_fail_and_leave_the_parents_alone() {
    child::alone(|| {
        for transport in support::TRANSPORTS {
            support::world(2, &support::config(transport), |comm| {
                let comm = std::mem::ManuallyDrop::new(comm);
                for _ in 0..20 {
                    add(&comm).unwrap();
                    // SAFETY: the child drops the copy and the parent drops the original, so each
                    // process drops its communicator once.
                    let pid = fork(|| use_inherited(unsafe { std::ptr::read(&*comm) }));
                    let mut status = -1;
                    // SAFETY: `waitpid` writes `status` only, and `pid` is a child of this process.
                    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
                    assert_eq!(status, 0, "{transport}: 256 = not refused, 512 = too late");
                }
                comm.barrier().unwrap();
                drop(std::mem::ManuallyDrop::into_inner(comm));
            });
        }
    });
}

/// A forked child must be able to join a communicator of its own.
#[test]
fn forked_children_can_join_a_communicator() {
    child::alone(|| {
        let config = support::config(TransportKind::Tcp);
        let id = UniqueId::create(&config).unwrap();
        let own = support::world(2, &config, |comm| {
            add(&comm).unwrap();
            let rank = comm.rank();
            let pid = fork(|| i32::from(add(&join(&id, rank)).is_err()));
            add(&comm).unwrap();
            let mut status = -1;
            // SAFETY: `waitpid` writes `status` only, and `pid` is a child of this process.
            (unsafe { libc::waitpid(pid, &mut status, 0) } == pid).then_some(status)
        });
        assert_eq!(own, [Some(0); 2]);
    });
}

/// C programs refer to communicators by handles. A child may be forked while other threads
/// register, look up and remove handles. It must still find its own handle, and be able to remove
/// it.
#[test]
fn forked_children_can_look_up_and_remove_handles() {
    child::alone(|| {
        static HANDLES: HandleTable<u32> = HandleTable::new("number", "number", 0xC1CF);
        let kept: *mut u8 = HANDLES.register(Arc::new(5)).unwrap();
        let kept = kept.addr();
        let handle = move || std::ptr::without_provenance_mut::<u8>(kept);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        assert_eq!(*HANDLES.lookup(handle()).unwrap(), 5);
                        let own: *mut u8 = HANDLES.register(Arc::new(6)).unwrap();
                        assert_eq!(*HANDLES.remove(own).unwrap(), 6);
                    }
                });
            }
            let ended = (0..100).all(|_| {
                let pid = fork(|| {
                    // SAFETY: `alarm` sets a timer of the child and touches no memory.
                    unsafe { libc::alarm(5) };
                    let found = HANDLES.lookup(handle()).is_ok_and(|five| *five == 5);
                    let made = HANDLES.register::<u8>(Arc::new(7)).is_ok();
                    i32::from(!(found && made && HANDLES.remove(handle()).is_ok()))
                });
                let mut status = -1;
                // SAFETY: `waitpid` writes `status` only, and `pid` is a child of this process.
                unsafe { libc::waitpid(pid, &mut status, 0) == pid && status == 0 }
            });
            done.store(true, Ordering::Relaxed);
            assert!(ended, "a child waits for ever, or finds nothing");
        });
    });
}
