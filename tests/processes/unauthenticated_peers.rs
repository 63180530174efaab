//! Unauthenticated connections during the rendezvous must be refused and delay no rank.
//!
//! The full test makes 10,000 hostile connections during 100 inits; a run with default settings makes a tenth
//! of these connections. The command for the full test is `CINCH_TEST_HOSTILE=10000 cargo test --release
//! --test processes hostile -- --nocapture`.

use cinch::bootstrap::{ControlPlane, OutOfBand};
use cinch::sync::Fault;
use cinch::{Config, UniqueId};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
/// Hostile connections for each init.
const PER_INIT: usize = 100;
const MAGIC: &[u8; 8] = b"cinch\x01\r\n";

/// Reads the server's address in a unique id: family, padding, port and IP from byte 52 on.
/// Attackers would find the address by scanning ports.
fn address_of(id: &UniqueId) -> SocketAddr {
    let bytes = id.as_bytes();
    assert_eq!(bytes[52], 4);
    let ip: [u8; 4] = bytes[56..60].try_into().unwrap();
    let port = u16::from_le_bytes([bytes[54], bytes[55]]);
    SocketAddr::new(Ipv4Addr::from(ip).into(), port)
}

/// Makes one hostile connection; successive values of `kind` select all kinds in turn. Open
/// connections stay in `crowd`. Returns whether a server listened.
fn attack(address: SocketAddr, kind: usize, crowd: &mut Vec<TcpStream>) -> bool {
    let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else {
        return false;
    };
    let mut hello = [0u8; 96];
    hello[..8].copy_from_slice(MAGIC);
    hello[8..12].copy_from_slice(&[1, 1, 0, 0]);
    // The server may close the connection at any of these writes.
    let _ = match kind % 7 {
        // Sends nothing.
        0 => Ok(()),
        // Closes the connection at once.
        1 => return true,
        // Sends a hello of the right format with an invalid proof.
        2 => stream
            .write_all(&hello)
            .and_then(|()| stream.write_all(&[0x5a; 32])),
        // Sends a byte now, and another byte at each later attack.
        3 => stream.write_all(&hello[..1]),
        // Sends garbage, which every field reads as a huge length.
        4 => stream.write_all(&[0xff; 4 << 10]),
        // Sends the right magic number with an unknown version.
        5 => {
            hello[8] = 99;
            stream.write_all(&hello)
        }
        // Sends half a hello, then ends the stream.
        _ => {
            let _ = stream.write_all(&hello[..50]);
            return true;
        }
    };
    for slow in crowd.iter_mut().rev().take(3) {
        let _ = slow.write(&[0]);
    }
    crowd.push(stream);
    // The number of connections that an attacker keeps open is limited.
    if crowd.len() > 2 * PER_INIT {
        crowd.drain(..PER_INIT);
    }
    true
}

/// Joins all ranks, the last one after `attacks` attacks have reached the server. Returns the number of
/// attacks, and the time from the start of the last rank.
fn init(config: &Config, crowd: &mut Vec<TcpStream>, attacks: usize) -> (usize, Duration) {
    let id = UniqueId::create_for_one_host(config).unwrap();
    let (address, done) = (address_of(&id), AtomicBool::new(false));
    let mut reached = 0;
    let mut started = Instant::now();
    std::thread::scope(|scope| {
        let join = |rank| {
            scope.spawn(move || {
                let fault = Fault::new();
                let plane = ControlPlane::join(&id, rank, RANKS, config, fault.clone()).unwrap();
                plane.barrier().unwrap();
                plane.leave();
                assert!(!fault.is_raised());
            })
        };
        let mut threads: Vec<_> = (0..RANKS - 1).map(join).collect();
        while reached < attacks {
            assert!(attack(address, reached, crowd));
            reached += 1;
        }
        if attacks == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (done, reached) = (&done, &mut reached);
        let siege = scope.spawn(move || {
            // The server refuses connections once the rendezvous is over.
            while attacks > 0 && !done.load(Ordering::Relaxed) && attack(address, *reached, crowd) {
                *reached += 1;
            }
        });
        started = Instant::now();
        threads.push(join(RANKS - 1));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        done.store(true, Ordering::Relaxed);
        siege.join().unwrap();
    });
    (reached, started.elapsed())
}

#[test]
fn hostile_connections_do_not_prevent_init() {
    let total = std::env::var("CINCH_TEST_HOSTILE").map_or(1000, |text| text.parse().unwrap());
    let config = Config {
        init_timeout: Duration::from_secs(20),
        ..Config::default()
    };
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    let inits = total / PER_INIT;
    let (mut quiet, mut besieged) = (Vec::new(), Vec::new());
    let (mut crowd, mut attacks) = (Vec::new(), 0);
    for _ in 0..inits {
        quiet.push(init(&config, &mut crowd, 0).1);
        let (reached, took) = init(&config, &mut crowd, PER_INIT);
        attacks += reached;
        besieged.push(took);
    }
    assert!(attacks >= total);
    println!(
        "{inits} of {inits} inits of {RANKS} ranks during {attacks} hostile connections: median \
         {:?}, without them {:?}",
        median(besieged),
        median(quiet)
    );
}
