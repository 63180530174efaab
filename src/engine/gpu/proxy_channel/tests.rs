//! Tests a proxy channel; the test itself plays the kernels at one end and the connection at the
//! other.

use super::*;
use crate::cpu::Isa;
use crate::gpu::abi::{Counters, LINE_BYTES, Protocol};
use crate::gpu::{Context, Device, Driver, PinnedMemory};
use crate::mem::{PeerBufferLayout, Staging};
use crate::plan::{GpuLimits, Limits, MachineFacts, Planner, Request, Resident};
use crate::schedule::Groups;
use crate::sys::cuda::mock::MockMachine as Gpus;
use crate::transport::HostLoad;
use crate::types::{
    CallTuning, CodecSetting, CodecSpec, Collective, DType, Fused, ReduceOp, SIGNATURE_WORDS,
    TransportKind,
};
use std::collections::VecDeque;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// State of the simulated connection, which both ends and the test share.
#[derive(Debug, Default)]
struct Wire {
    sent: Vec<(Header, Vec<u8>)>,
    /// Number of free slots for messages to the peer.
    room: usize,
    stuck: bool,
    coming: VecDeque<(Header, Vec<u8>)>,
    broken: [bool; 2],
}

#[derive(Debug)]
struct End {
    wire: Arc<Mutex<Wire>>,
    slot: Vec<u8>,
}

fn lost() -> Error {
    Error::new(ErrorKind::Remote, "rank 1 closed its connection")
}

impl SendEnd for End {
    fn ready(&mut self) -> Result<bool> {
        let wire = self.wire.lock().unwrap();
        if wire.broken[SEND] {
            return Err(lost());
        }
        Ok(wire.room > 0)
    }
    fn slot(&mut self) -> &mut [u8] {
        &mut self.slot
    }
    fn written(&self) -> &[u8] {
        &self.slot
    }
    fn publish(&mut self, header: Header) {
        let mut wire = self.wire.lock().unwrap();
        wire.room -= 1;
        let payload = self.slot[..header.bytes as usize].to_vec();
        wire.sent.push((header, payload));
    }
    fn flushed(&mut self) -> Result<bool> {
        Ok(!self.wire.lock().unwrap().stuck)
    }
}

impl RecvEnd for End {
    fn ready(&mut self) -> Result<bool> {
        let wire = self.wire.lock().unwrap();
        let Some((_, payload)) = wire.coming.front() else {
            return match wire.broken[RECV] {
                true => Err(lost()),
                false => Ok(false),
            };
        };
        self.slot.clone_from(payload);
        Ok(true)
    }
    fn header(&self) -> Header {
        self.wire.lock().unwrap().coming[0].0
    }
    fn payload(&self) -> &[u8] {
        &self.slot
    }
    fn release(&mut self) {
        self.wire.lock().unwrap().coming.pop_front();
    }
}

struct Bench {
    proxy_channel: ProxyChannel,
    message_sizes: MessageSizesCache,
    wire: Arc<Mutex<Wire>>,
    staging: Arc<Staging>,
    shape: PeerBufferLayout,
    /// Signature of the call in which this rank sends; `theirs` is the signature of the call in
    /// which the peer sends.
    signature: [u64; SIGNATURE_WORDS],
    theirs: [u64; SIGNATURE_WORDS],
    /// Bytes of each message of a call; both calls have equal messages.
    bytes: Vec<usize>,
}

/// Elements of a message from rank 0 to rank 1 that takes several slots of one channel.
const COUNT: usize = 50_000;

/// Name of rank 1.
const PEER: &str = "rank 1 (host b, pid 7)";

impl Bench {
    fn new() -> Bench {
        Bench::with_checks(false)
    }

    fn with_checks(checks_data: bool) -> Bench {
        let process = Gpus::new(1).process();
        let driver = Driver::with(Box::new(process)).unwrap();
        let context = Context::primary(&Device::at(&driver, 0).unwrap()).unwrap();
        let shape = PeerBufferLayout::new(2, 1 << 20, 1).unwrap();
        let memory = || PinnedMemory::new(&context, shape.bytes()).unwrap();
        let staging = Arc::new(Staging::new(memory(), memory(), &shape).unwrap());
        let gpu = GpuLimits::new(&shape, Resident::both(16), 1);
        let limits = Limits {
            nranks: 2,
            slot_bytes: gpu.fifos[0].0,
            slots: 2,
            channels: 1,
            algorithm: None,
            machine: MachineFacts {
                transport: TransportKind::Tcp,
                inside: TransportKind::Cuda,
                load: HostLoad::LIGHT,
                measured: None,
            },
            hosts: Groups::even_hosts(2, 1),
            topology: None,
            gpu: Some(gpu.clone()),
        };
        let request = Request {
            collective: Collective::SendRecv,
            dtype: DType::U8,
            op: ReduceOp::Sum,
            count: COUNT,
            root: 0,
            peer: 1,
            codec: CodecSetting::RAW,
            algorithm: None,
            tuning: CallTuning::AUTO,
            tensor: None,
            feedback: None,
            fused: Fused::ALONE,
        };
        let mut planner = Planner::new(limits, 0, Isa::Scalar);
        let plan = planner.plan(&request).unwrap();
        let signature = request.signature(plan.algorithm, CodecSpec::RAW, 5).words();
        let back = Request {
            root: 1,
            peer: 0,
            ..request
        };
        let theirs = back.signature(plan.algorithm, CodecSpec::RAW, 7).words();
        let bytes = (0..plan.geometry.passes())
            .map(|pass| plan.geometry.range(pass, 0).len())
            .collect();
        let wire = Arc::new(Mutex::new(Wire {
            room: 1000,
            ..Wire::default()
        }));
        let end = || {
            Box::new(End {
                wire: wire.clone(),
                slot: vec![0; gpu.fifos[0].0],
            })
        };
        // SAFETY: the only call for channel 0, so no other value has these ends.
        let base = unsafe { staging.ends(0) };
        Bench {
            proxy_channel: ProxyChannel::new(
                (1, PEER.into(), 0),
                base,
                (end(), end()),
                checks_data,
            ),
            message_sizes: MessageSizesCache::new(planner),
            wire,
            staging,
            shape,
            signature,
            theirs,
            bytes,
        }
    }

    /// Returns message `number` that the peer sends. Each of its bytes is the message's number.
    fn comes(&self, number: usize) -> (Header, Vec<u8>) {
        let bytes = self.bytes[number % self.bytes.len()];
        let header = Header {
            bytes: bytes as u32,
            signature: self.theirs,
            crc: 0,
        };
        (header, vec![number as u8; bytes])
    }

    fn progress(&mut self) -> Result<bool> {
        self.proxy_channel.progress(&mut self.message_sizes)
    }

    fn wire(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.wire.lock().unwrap()
    }

    /// Returns a counter of the inbox or the outbox, as kernels access it.
    fn counter(&self, outbox: bool, offset: usize) -> &AtomicU64 {
        let (inbox, out) = self.staging.addresses();
        let base = if outbox { out } else { inbox };
        let at = base + self.shape.fifo(Protocol::Simple).counters + offset as u64;
        // SAFETY: the counter lies in staging memory, which the bench owns.
        unsafe { &*(at as *const AtomicU64) }
    }

    fn slot(&self, outbox: bool, number: u64) -> *mut u8 {
        let fifo = self.shape.fifo(Protocol::Simple);
        let (inbox, out) = self.staging.addresses();
        let base = if outbox { out } else { inbox };
        (base + fifo.slots + number % self.depth() * u64::from(fifo.stride)) as *mut u8
    }

    /// Returns the number of slots of a channel.
    fn depth(&self) -> u64 {
        u64::from(self.shape.fifo(Protocol::Simple).depth)
    }

    /// Publishes message `number` as a kernel does, with the call's signature if it is the first.
    fn kernel_sends(&self, number: u64, first: bool) {
        let slot = self.slot(true, number);
        let bytes = self.bytes[number as usize % self.bytes.len()];
        // SAFETY: `slot` is a free slot of the outbox, with a header line before it and room for
        // `bytes`.
        unsafe {
            slot.write_bytes(number as u8, bytes);
            if first {
                let header = slot.sub(LINE_BYTES).cast::<[u64; SIGNATURE_WORDS]>();
                header.write(self.signature);
            }
        }
        self.counter(true, offset_of!(Counters, tail))
            .store(number + 1, Ordering::Release);
    }

    fn credit(&self) -> u64 {
        self.counter(false, offset_of!(Counters, head))
            .load(Ordering::Acquire)
    }

    fn arrived(&self) -> u64 {
        self.counter(false, offset_of!(Counters, tail))
            .load(Ordering::Acquire)
    }

    fn kernel_takes(&self, messages: u64) {
        self.counter(true, offset_of!(Counters, head))
            .store(messages, Ordering::Release);
    }
}

#[test]
fn sent_messages_keep_order_and_length_and_return_credits() {
    let mut bench = Bench::new();
    let length = bench.bytes.len() as u64;
    assert!(length > 2 && bench.bytes[0] != bench.bytes[length as usize - 1]);
    assert!(!bench.progress().unwrap());
    // Over three calls, the position in the slots wraps around in the middle of a call.
    for number in 0..3 * length {
        bench.kernel_sends(number, number % length == 0);
        assert!(bench.progress().unwrap());
        assert_eq!(bench.credit(), number + 1);
        let wire = bench.wire();
        let (header, payload) = wire.sent.last().unwrap();
        assert_eq!(header.signature, bench.signature);
        assert_eq!(payload.len(), bench.bytes[(number % length) as usize]);
        assert!(payload.iter().all(|&byte| byte == number as u8));
    }
    assert!(!bench.progress().unwrap());
    assert_eq!(bench.wire().sent.len() as u64, 3 * length);
}

#[test]
fn full_connection_blocks_messages_and_credits() {
    let mut bench = Bench::new();
    bench.wire().room = 1;
    bench.wire().stuck = true;
    bench.kernel_sends(0, true);
    bench.kernel_sends(1, false);
    assert!(bench.progress().unwrap());
    assert_eq!(bench.credit(), 1);
    assert!(!bench.progress().unwrap() && bench.proxy_channel.has_pending().unwrap());
    bench.wire().room = 1;
    assert!(bench.progress().unwrap());
    assert_eq!(bench.credit(), 2);
    // Every message is in the connection, but not every byte has left the process.
    assert!(bench.proxy_channel.has_pending().unwrap());
    bench.wire().stuck = false;
    bench.progress().unwrap();
    assert!(!bench.proxy_channel.has_pending().unwrap());
}

#[test]
fn messages_wait_for_free_slots_of_kernels() {
    let mut bench = Bench::new();
    let count = 2 * bench.bytes.len() as u64 + 1;
    let coming = (0..count as usize).map(|number| bench.comes(number));
    let coming: VecDeque<_> = coming.collect();
    bench.wire().coming = coming;
    for taken in 0..count {
        bench.kernel_takes(taken);
        bench.progress().unwrap();
        assert_eq!(bench.arrived(), (taken + bench.depth()).min(count));
        let slot = bench.slot(false, taken);
        let bytes = bench.bytes[taken as usize % bench.bytes.len()];
        // SAFETY: `slot` is a published slot of the inbox; the proxy does not write it before
        // credit returns.
        unsafe {
            let header = slot.sub(LINE_BYTES).cast::<[u64; SIGNATURE_WORDS]>();
            assert_eq!(header.read(), bench.theirs);
            let payload = std::slice::from_raw_parts(slot, bytes);
            assert!(payload.iter().all(|&byte| u64::from(byte) == taken));
        }
    }
}

#[test]
fn wrong_length_is_an_error_and_copies_nothing() {
    for whole in [0, 1] {
        let right = Bench::new().bytes[whole] as u32;
        for bytes in [0, right - 1, right + 1, u32::MAX] {
            let mut bench = Bench::new();
            let (mut header, payload) = bench.comes(whole);
            header.bytes = bytes;
            let first = (0..whole).map(|number| bench.comes(number));
            let coming: VecDeque<_> = first.chain([(header, payload)]).collect();
            bench.wire().coming = coming;
            let error = bench.progress().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            let words = [PEER.into(), bytes.to_string(), right.to_string()];
            assert!(
                words.iter().all(|word| error.message().contains(word)),
                "{error}"
            );
            assert_eq!(bench.arrived(), whole as u64);
        }
    }
}

#[test]
fn changed_payload_names_rank_host_and_process() {
    let mut bench = Bench::with_checks(true);
    let (mut right, payload) = bench.comes(0);
    right.crc = crc32c::crc32c(&payload);
    let mut changed = payload.clone();
    changed[payload.len() / 2] ^= 1;
    bench.wire().coming = VecDeque::from([(right, payload)]);
    assert!(bench.progress().unwrap());
    let mut bench = Bench::with_checks(true);
    bench.wire().coming = VecDeque::from([(right, changed)]);
    // The connection counts as broken, so that a better cause may arrive first.
    assert!(!bench.progress().unwrap());
    let (_, error) = bench.proxy_channel.broken(true).unwrap().unwrap();
    assert_eq!(error.kind(), ErrorKind::Remote);
    let words = format!("from {PEER} changed on their way");
    assert!(error.message().contains(&words), "{error}");
    assert_eq!(bench.arrived(), 0);
}

#[test]
fn message_of_another_call_is_a_mismatch_with_the_peer() {
    let mut bench = Bench::new();
    let mut other = bench.comes(1);
    other.0.signature[3] += 1;
    let coming = VecDeque::from([bench.comes(0), other]);
    bench.wire().coming = coming;
    let error = bench.progress().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert!(
        error.message().contains("rank 1 began") && error.message().contains("in the middle of"),
        "{error}"
    );
    // The peer sends nothing in a call with this rank's signature, nor in a call without a
    // signature.
    for signature in [bench.signature, [0; SIGNATURE_WORDS]] {
        let mut bench = Bench::new();
        let mut message = bench.comes(0);
        message.0.signature = signature;
        bench.wire().coming.push_back(message);
        let error = bench.progress().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.message().contains("rank 1 sent"), "{error}");
        assert_eq!(bench.arrived(), 0);
    }
}

#[test]
fn impossible_counters_are_errors() {
    let mut bench = Bench::new();
    let most = bench.depth() + 1;
    bench
        .counter(true, offset_of!(Counters, tail))
        .store(most, Ordering::Release);
    let error = bench.progress().unwrap_err();
    let words = format!("published {most} messages");
    assert!(error.message().contains(&words), "{error}");
    let mut bench = Bench::new();
    bench.kernel_takes(1);
    assert!(
        bench
            .progress()
            .unwrap_err()
            .message()
            .contains("taken messages")
    );
    // The first message of a call must carry a signature.
    let mut bench = Bench::new();
    bench.kernel_sends(0, false);
    assert!(
        bench
            .progress()
            .unwrap_err()
            .message()
            .contains("of no call")
    );
    assert!(bench.wire().sent.is_empty());
}

#[test]
fn broken_connection_concerns_only_waiting_kernels() {
    let mut bench = Bench::new();
    bench.wire().broken = [true, true];
    let message = bench.comes(0);
    bench.wire().coming.push_back(message);
    // Messages that arrived before the break are still delivered.
    assert!(bench.progress().unwrap());
    assert!(!bench.progress().unwrap());
    assert_eq!(bench.arrived(), 1);
    assert!(
        bench.proxy_channel.broken(false).unwrap().is_none(),
        "nobody waits"
    );
    let (_, error) = bench.proxy_channel.broken(true).unwrap().unwrap();
    assert!(error.message().contains("rank 1"), "{error}");
    bench.kernel_sends(0, true);
    assert!(!bench.progress().unwrap());
    assert!(
        bench.proxy_channel.broken(false).unwrap().is_some(),
        "a kernel sends"
    );
    assert_eq!(bench.credit(), 0);
}
