//! Tests with ranks that are processes: forked, joined by a socket pair, and sometimes killed.

use super::world::{PATIENCE, World, config, connect, kinds, recv, send, wait};
use super::{check, fill, header};
use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::testing::on_rdma_devices;
use crate::transport::{InboxMemory, Links, caps};
use crate::types::{SIGNATURE_WORDS, TransportKind};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Runs `body` in a forked child with one thread; a panic makes the child fail. The child closes every
/// descriptor except `keep`, because a copy of another test's socket would keep that socket open.
fn child(keep: Option<RawFd>, body: impl FnOnce()) -> Pid {
    // SAFETY: the child runs on this thread only, uses an allocator that survives forks, and leaves
    // by `_exit`, so nothing of the test harness runs twice.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let keep = keep.map_or(2, |fd| fd as libc::c_uint);
            for (first, last) in [(3, keep.max(3) - 1), (keep + 1, libc::c_uint::MAX)] {
                // glibc has a function of this name since 2.34; tests are linked with 2.28 too.
                // SAFETY: the threads that own these descriptors do not exist in the child.
                unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
            }
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: `_exit` ends the process without running destructors.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
    }
}

fn ended_well(child: Pid) {
    assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
}

/// A process of a pair, with its end of a socket pair.
#[derive(Debug)]
struct Pair {
    rank: usize,
    peers: Vec<PeerInfo>,
    stream: UnixStream,
}

impl Pair {
    fn new() -> (Pair, Pair) {
        let (one, two) = UnixStream::pair().unwrap();
        let peer = |rank| PeerInfo {
            rank,
            pid: std::process::id(),
            uid: nix::unistd::geteuid().as_raw(),
            host: "here".into(),
            host_id: [1; 16],
            process_id: [rank as u8; 16],
            address: [127, 0, 0, 1].into(),
        };
        let side = |rank, stream: UnixStream| {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Pair {
                rank,
                peers: vec![peer(0), peer(1)],
                stream,
            }
        };
        (side(0, one), side(1, two))
    }
}

impl OutOfBand for Pair {
    fn rank(&self) -> usize {
        self.rank
    }

    fn peers(&self) -> &[PeerInfo] {
        &self.peers
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let swap = || -> std::io::Result<Vec<u8>> {
            let mut stream = &self.stream;
            stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
            stream.write_all(bytes)?;
            let mut length = [0; 4];
            stream.read_exact(&mut length)?;
            let mut their = vec![0; u32::from_le_bytes(length) as usize];
            stream.read_exact(&mut their)?;
            Ok(their)
        };
        let their = swap().map_err(|error| Error::system("exchanging", error))?;
        let mut all = [bytes.to_vec(), their];
        all.rotate_right(self.rank);
        Ok(all.into())
    }

    fn announce(&self, _: &Error) {}

    fn log_call(&self, _: [u64; SIGNATURE_WORDS]) {}

    fn has_left(&self, _: usize) -> bool {
        false
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        [purpose.len() as u8; 32]
    }

    fn leave(&self) {}
}

/// Returns the transports between processes. Simulated RDMA devices exist in one process only.
fn between_processes() -> Vec<TransportKind> {
    match on_rdma_devices() {
        true => vec![TransportKind::Rdma],
        false => {
            let is_simulated = |&kind: &TransportKind| kind == TransportKind::Rdma;
            let of_threads = |kind| caps(kind).unwrap().inbox == InboxMemory::Private;
            let others = kinds().into_iter().filter(|kind| !is_simulated(kind));
            others.filter(|&kind| !of_threads(kind)).collect()
        }
    }
}

fn talk(mut links: Links, exchange: &Pair) {
    let peer = 1 - exchange.rank;
    for seed in 0..500 {
        let bytes = (seed as usize * 37) % (links.slot_bytes + 1);
        send(&mut links, peer, 1, header(bytes, seed), |slot| {
            fill(slot, seed)
        });
        recv(&mut links, peer, 1, |end| check(end, bytes, seed));
    }
    wait(&mut links, |links| {
        links.sends[links.nranks + peer]
            .as_mut()
            .unwrap()
            .flushed()
            .unwrap()
    });
    exchange.barrier().unwrap();
}

#[test]
fn processes_exchange_messages() {
    for kind in between_processes() {
        let (one, two) = Pair::new();
        let other = child(Some(two.stream.as_raw_fd()), move || {
            talk(connect(&two, &config(kind), None).unwrap(), &two)
        });
        talk(connect(&one, &config(kind), None).unwrap(), &one);
        ended_well(other);
    }
}

fn shm_names() -> Vec<std::ffi::OsString> {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    names
        .filter(|name| name.to_string_lossy().contains("cinch"))
        .collect()
}

#[test]
fn killed_process_is_detected_and_leaves_nothing() {
    for kind in between_processes() {
        // A process of another test that was killed while it connected may have left a socket file.
        let before = shm_names();
        // The child keeps no descriptor of other tests.
        let survivor = child(None, move || {
            let (one, two) = Pair::new();
            let victim = child(Some(two.stream.as_raw_fd()), move || {
                let mut links = connect(&two, &config(kind), None).unwrap();
                send(&mut links, 0, 0, header(64, 1), |slot| fill(slot, 1));
                wait(&mut links, |_| false);
            });
            let mut links = connect(&one, &config(kind), None).unwrap();
            recv(&mut links, 1, 0, |end| check(end, 64, 1));
            kill(victim, Signal::SIGKILL).unwrap();
            waitpid(victim, None).unwrap();
            let until = Instant::now() + PATIENCE;
            let found = loop {
                match links.recvs[1].as_mut().unwrap().ready() {
                    Ok(found) => assert!(!found),
                    Err(error) => break Some(error),
                }
                if caps(kind).unwrap().shares_memory() {
                    break None;
                }
                assert!(Instant::now() < until, "the death was not detected");
                links.waiter.idle(9999, Duration::from_millis(1)).unwrap();
            };
            if !caps(kind).unwrap().shares_memory() {
                let error = found.unwrap();
                assert_eq!(error.kind(), ErrorKind::Remote);
                assert!(error.message().contains("rank 1"), "{error}");
            }
            // Memory shared with the dead process stays mapped.
            let end = links.sends[1].as_mut().unwrap();
            if caps(kind).unwrap().shares_memory() {
                assert!(end.ready().unwrap());
                end.slot().fill(1);
                end.publish(header(64, 2));
            }
            drop(links);
            let mut left = shm_names();
            left.retain(|name| !before.contains(name));
            assert_eq!(left, [""; 0]);
        });
        ended_well(survivor);
    }
}

/// Brings the loopback interface of this network namespace up or down.
fn loopback(up: bool) -> std::io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: `request` is plain data for which zeros are valid, and outlives both calls.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = if up { libc::IFF_UP as libc::c_short } else { 0 };
        match libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

#[test]
fn cut_link_is_an_error_that_names_the_peer() {
    for sends in [true, false] {
        ended_well(child(None, move || {
            // SAFETY: the child has one thread; the namespaces end with the child.
            let apart = unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) };
            if apart != 0 || loopback(true).is_err() {
                println!("skipped: no network namespace of our own can be made here");
                return;
            }
            World::new(2).run(&config(TransportKind::Tcp), |mut links, exchange| {
                if links.rank == 1 {
                    exchange.barrier().unwrap();
                    return exchange.barrier().unwrap();
                }
                exchange.barrier().unwrap();
                loopback(false).unwrap();
                let start = Instant::now();
                if sends {
                    send(&mut links, 1, 0, header(64, 1), |slot| fill(slot, 1));
                }
                let error = loop {
                    match links.recvs[1].as_mut().unwrap().ready() {
                        Ok(found) => assert!(!found),
                        Err(error) => break error,
                    }
                    links.waiter.idle(9999, Duration::from_millis(10)).unwrap();
                    assert!(start.elapsed() < Duration::from_secs(20), "not noticed");
                };
                println!("cut, sends {sends}: {:?}: {error}", start.elapsed());
                assert_eq!(error.kind(), ErrorKind::Remote);
                assert!(error.message().contains("rank 1 (host"), "{error}");
                exchange.barrier().unwrap();
            });
        }));
    }
}

/// Returns the counts of descriptors, threads and memfd mappings, and the kilobytes of address space.
fn holdings() -> (usize, usize, usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size = size.unwrap().trim().trim_end_matches(" kB").parse();
    (
        count("/proc/self/fd"),
        count("/proc/self/task"),
        maps.lines()
            .filter(|line| line.contains("memfd:cinch"))
            .count(),
        size.unwrap(),
    )
}

#[test]
fn drop_leaves_nothing() {
    for kind in kinds() {
        ended_well(child(None, move || {
            // SAFETY: no other thread allocates yet. More arenas would reserve address space and could hide a
            // leak.
            unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
            let mut config = config(kind);
            config.slot_bytes = 1 << 20;
            let cycle = || {
                World::new(3).run(&config, |mut links, exchange| {
                    let (to, from) = ((links.rank + 1) % 3, (links.rank + 2) % 3);
                    send(&mut links, to, 0, header(64, 1), |slot| fill(slot, 1));
                    recv(&mut links, from, 0, |end| check(end, 64, 1));
                    exchange.barrier().unwrap();
                });
            };
            // The first cycles fill caches of the runtime, such as stacks and arenas.
            (0..4).for_each(|_| cycle());
            let mut before = holdings();
            // The child has this thread only, whatever the parent's count.
            before.1 = 1;
            (0..12).for_each(|_| cycle());
            // The kernel removes threads a little after they are joined.
            let until = Instant::now() + PATIENCE;
            while holdings().1 > before.1 && Instant::now() < until {
                std::thread::yield_now();
            }
            let after = holdings();
            assert_eq!((after.0, after.1, after.2), (before.0, before.1, before.2));
            // Leaking a region in each cycle would add 12 * 24 MiB; leaking a FIFO, 12 * 4 MiB.
            assert!(after.3 < before.3 + (24 << 10), "{before:?} {after:?}");
        }));
    }
}
