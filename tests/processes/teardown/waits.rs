//! Tests how the host engine waits: for ranks that leave, for data that arrives late, and after its own
//! thread was stopped for a while.

use super::soon;
use crate::support::{TRANSPORTS, config};
use cinch::bootstrap::{LocalOutOfBand, OutOfBand, OutOfBandRef};
use cinch::cpu::Isa;
use cinch::engine::HostEngine;
use cinch::mem::UserBuffers;
use cinch::plan::{MachineFacts, Request};
use cinch::schedule::Groups;
use cinch::sync::Fault;
use cinch::transport::{ConnectContext, Header, HostLoad, Links, RecvEnd, Waiter, connect_all};
use cinch::types::TransportKind;
use cinch::{CallTuning, CodecSetting, Collective, Config, DType, ErrorKind, ReduceOp};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A receiving end for which a function of the test decides whether a message has arrived.
struct ObservedRecv<F>(Box<dyn RecvEnd>, F);

impl<F> fmt::Debug for ObservedRecv<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<F: FnMut(&mut dyn RecvEnd) -> cinch::Result<bool> + Send> RecvEnd for ObservedRecv<F> {
    fn ready(&mut self) -> cinch::Result<bool> {
        (self.1)(&mut *self.0)
    }

    fn header(&self) -> Header {
        self.0.header()
    }

    fn payload(&self) -> &[u8] {
        self.0.payload()
    }

    fn release(&mut self) {
        self.0.release();
    }
}

/// A receiving end that flips a bit of each message's payload.
#[derive(Debug)]
struct FlippingRecv {
    end: Box<dyn RecvEnd>,
    bit: usize,
    payload: Vec<u8>,
}

impl RecvEnd for FlippingRecv {
    fn ready(&mut self) -> cinch::Result<bool> {
        let ready = self.end.ready()?;
        if ready {
            self.payload = self.end.payload().to_vec();
            self.payload[self.bit / 8] ^= 1 << (self.bit % 8);
        }
        Ok(ready)
    }

    fn header(&self) -> Header {
        self.end.header()
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    fn release(&mut self) {
        self.end.release();
    }
}

/// A waiter that calls a function of the test before each wait.
struct ObservedWaiter<F>(Box<dyn Waiter>, F);

impl<F> fmt::Debug for ObservedWaiter<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<F: FnMut(u32) + Send> Waiter for ObservedWaiter<F> {
    fn idle(&mut self, scans: u32, limit: Duration) -> cinch::Result<()> {
        (self.1)(scans);
        self.0.idle(scans, limit)
    }

    fn leaves_core(&self, scans: u32) -> bool {
        self.0.leaves_core(scans)
    }
}

/// Wraps all receiving ends, so that `ready` decides whether a message has arrived.
fn observe_receives<F>(mut links: Links, ready: F) -> Links
where
    F: FnMut(&mut dyn RecvEnd) -> cinch::Result<bool> + Clone + Send + 'static,
{
    let watched = |end| Box::new(ObservedRecv(end, ready.clone())) as Box<dyn RecvEnd>;
    let ends = std::mem::take(&mut links.recvs).into_iter();
    links.recvs = ends.map(|end| end.map(watched)).collect();
    links
}

/// Wraps the waiter, so that `idle` is called before each wait.
fn observe_waits(links: Links, idle: impl FnMut(u32) + Send + 'static) -> Links {
    Links {
        waiter: Box::new(ObservedWaiter(links.waiter, idle)),
        ..links
    }
}

/// Runs two engines. Rank 0 sends `count` bytes and leaves; rank 1 expects 8 bytes, which its links
/// deliver after 0.8 s.
fn slow(transport: TransportKind, count: usize) -> cinch::Result<Vec<u8>> {
    let late = |links, _| {
        let late = Instant::now() + Duration::from_millis(800);
        observe_receives(links, move |end| Ok(Instant::now() >= late && end.ready()?))
    };
    one_message(&config(transport), count, || (), late)
}

/// Runs two engines and returns the result of rank 1. Rank 0 calls `before`, sends `count` bytes
/// and leaves. Rank 1 expects 8 bytes over links that `alter` has wrapped.
fn one_message(
    config: &Config,
    count: usize,
    before: impl Fn() + Sync,
    alter: impl Fn(Links, OutOfBandRef) -> Links + Sync,
) -> cinch::Result<Vec<u8>> {
    let faults = [Fault::new(), Fault::new()];
    let transport = config.transport.expect("a transport");
    let ranks = LocalOutOfBand::world_with(2, &faults, config);
    let results: Vec<_> = std::thread::scope(|scope| {
        let ranks = ranks.into_iter().zip(&faults).map(|(exchange, fault)| {
            let (before, alter) = (&before, &alter);
            scope.spawn(move || {
                let (rank, exchange): (usize, OutOfBandRef) = (exchange.rank(), exchange);
                let links = connect_all(&ConnectContext {
                    exchange: &*exchange,
                    config,
                    fault,
                    deadline: Instant::now() + config.init_timeout,
                    place: cinch::topology::RankPlace::Unknown,
                    sys: std::path::Path::new(cinch::sys::numa::SYS),
                    verbs: None,
                })?;
                let links = match rank {
                    0 => links,
                    _ => alter(links, exchange.clone()),
                };
                let machine = MachineFacts {
                    transport,
                    inside: transport,
                    load: HostLoad { ranks: 2, cores: 1 },
                    measured: None,
                };
                let hosts = Groups::of_hosts(exchange.peers().iter().map(|peer| peer.host_id));
                let (isa, parts) = (Isa::detect(), (machine, hosts));
                let mut engine =
                    HostEngine::new(links, exchange.clone(), fault.clone(), config, isa, parts);
                let request = Request {
                    collective: Collective::SendRecv,
                    dtype: DType::U8,
                    op: ReduceOp::Sum,
                    count: if rank == 0 { count } else { 8 },
                    root: 0,
                    peer: 1,
                    codec: CodecSetting::RAW,
                    algorithm: None,
                    tuning: CallTuning::AUTO,
                    tensor: None,
                    feedback: None,
                    fused: cinch::types::Fused::ALONE,
                };
                let (sent, mut got) = (vec![5; count], vec![0; 8]);
                if rank == 0 {
                    before();
                    if count > 0 {
                        let run = engine.prepare(request, UserBuffers::new(&sent, &mut []))?;
                        engine.run(run)?;
                    }
                    // Leaves the exchange, as dropping a communicator does.
                    exchange.leave();
                } else {
                    let run = engine.prepare(request, UserBuffers::new(&[], &mut got))?;
                    engine.run(run)?;
                }
                Ok(got)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let results = ranks.into_iter().map(|rank| rank.join().expect("a rank"));
        results.collect()
    });
    let [first, second] = results.try_into().expect("two ranks");
    first.expect("rank 0");
    second
}

#[test]
fn late_message_of_a_rank_that_left_is_received() {
    assert_eq!(slow(TransportKind::Tcp, 8).unwrap(), vec![5; 8]);
    for transport in [TransportKind::Tcp, TransportKind::Shm] {
        let error = slow(transport, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote);
        for part in ["rank 0 (", "left the communicator, and rank 1 still waits"] {
            assert!(error.message().contains(part), "{transport}: {error}");
        }
    }
}

/// Rank 1 scans for messages before rank 0 sends, and checks which ranks have left after rank 0 has
/// left. It must scan again before it reports an error.
#[test]
fn message_sent_between_scan_and_leave_check_is_received() {
    let go = &*Box::leak(Box::new(AtomicBool::new(false)));
    let sent = one_message(
        &config(TransportKind::Shm),
        8,
        || assert!(soon(|| go.load(Ordering::Acquire))),
        |links, exchange| {
            let waited = Arc::new(AtomicBool::new(false));
            let (begin, behind) = (Instant::now(), waited.clone());
            let links = observe_waits(links, move |_| waited.store(true, Ordering::Relaxed));
            observe_receives(links, move |end| {
                let ready = end.ready()?;
                // After this time the engine checks after each wait whether the awaited rank has
                // left.
                let asks = begin.elapsed() > Duration::from_millis(600);
                if behind.swap(false, Ordering::Relaxed) && asks && !ready {
                    go.store(true, Ordering::Release);
                    assert!(soon(|| exchange.has_left(0)));
                }
                Ok(ready)
            })
        },
    );
    assert_eq!(sent.unwrap(), vec![5; 8]);
}

/// The message arrives after the last scan, but before the engine determines for which rank it has
/// waited too long. The engine must then find no such rank.
#[test]
fn message_at_the_end_of_the_timeout_is_received() {
    let config = Config {
        timeout: Duration::from_secs(1),
        ..config(TransportKind::Shm)
    };
    let go = &*Box::leak(Box::new(AtomicBool::new(false)));
    let sent = one_message(
        &config,
        8,
        || assert!(soon(|| go.load(Ordering::Acquire))),
        |links, _| {
            let waited = Arc::new(AtomicBool::new(false));
            let (begin, behind) = (Instant::now(), waited.clone());
            // After 0.6 s the engine checks after each wait for which rank it waits. In this test only that
            // check sees the message; scans do not.
            let links = observe_waits(links, move |_| {
                waited.store(true, Ordering::Relaxed);
                go.fetch_or(
                    begin.elapsed() > Duration::from_millis(600),
                    Ordering::Release,
                );
            });
            observe_receives(links, move |end| {
                let sees = behind.swap(false, Ordering::Relaxed)
                    || begin.elapsed() > Duration::from_secs(2);
                Ok(sees && end.ready()?)
            })
        },
    );
    assert_eq!(sent.unwrap(), vec![5; 8]);
}

/// The engine's thread may be stopped for longer than its timeout, for example with its machine. A
/// message that arrived meanwhile, or arrives right afterwards, must still be received.
#[test]
fn stopped_thread_does_not_time_out() {
    let config = Config {
        timeout: Duration::from_secs(2),
        ..config(TransportKind::Shm)
    };
    for comes_meanwhile in [true, false] {
        let go = &*Box::leak(Box::new(AtomicBool::new(false)));
        let sent = one_message(
            &config,
            8,
            || assert!(soon(|| go.load(Ordering::Acquire))),
            |links, _| {
                let stops = config.timeout * 2;
                observe_waits(links, move |scans| {
                    // From this scan on the engine reads the clock after each scan.
                    if scans == 2100 {
                        go.store(comes_meanwhile, Ordering::Release);
                        std::thread::sleep(stops);
                    }
                    go.fetch_or(scans > 2110, Ordering::Release);
                })
            },
        );
        assert_eq!(sent.unwrap(), vec![5; 8], "{comes_meanwhile}");
    }
}

#[test]
fn flipped_bit_is_an_error_that_names_the_sender_if_checks_are_on() {
    for transport in TRANSPORTS {
        for bit in 0..64 {
            let flip = |mut links: Links, _| {
                let flipping = |end| {
                    let payload = Vec::new();
                    Box::new(FlippingRecv { end, bit, payload }) as Box<dyn RecvEnd>
                };
                let ends = std::mem::take(&mut links.recvs).into_iter();
                links.recvs = ends.map(|end| end.map(flipping)).collect();
                links
            };
            let checked = Config {
                checks_data: true,
                ..config(transport)
            };
            let error = one_message(&checked, 8, || (), flip).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{error}");
            for part in ["8 bytes from rank 0", transport.name(), "CRC-32C"] {
                assert!(error.message().contains(part), "{error}");
            }
            if bit == 0 {
                let same = |links, _| links;
                assert_eq!(one_message(&checked, 8, || (), same).unwrap(), [5; 8]);
                let unchecked = one_message(&config(transport), 8, || (), flip).unwrap();
                assert_eq!(unchecked[..2], [4, 5]);
            }
        }
    }
}
