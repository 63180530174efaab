//! Tests the device behaviour on which transports rely, and the failures that tests can request.

use super::super::{Api, inline, types::*};
use super::{Fabric, FakeDevice};
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::Arc;

/// A queue pair with a completion queue, and 4 KiB of memory that its peer may write.
struct End {
    fabric: Arc<Fabric>,
    context: *mut IbvContext,
    domain: *mut IbvPd,
    queue: *mut IbvCq,
    pair: *mut IbvQp,
    region: *mut IbvMr,
    memory: Vec<u64>,
}

// The unsafe blocks below rely on `End`. It creates all objects, uses them by the contracts of the
// C functions, and destroys them only in `drop`.
impl End {
    fn open(fabric: &Arc<Fabric>, sends: u32) -> End {
        let mut count = 0;
        let mut memory = vec![0_u64; 512];
        // SAFETY: `End` uses its objects by the C functions' contracts, and destroys them only in
        // `drop`.
        unsafe {
            let list = fabric.get_device_list(&mut count);
            let context = fabric.open_device(*list);
            fabric.free_device_list(list);
            let domain = fabric.alloc_pd(context);
            let queue = fabric.create_cq(context, 16, null_mut(), null_mut(), 0);
            let mut attributes: IbvQpInitAttr = std::mem::zeroed();
            (attributes.send_cq, attributes.recv_cq) = (queue, queue);
            attributes.qp_type = IBV_QPT_RC;
            attributes.cap = IbvQpCap {
                max_send_wr: sends,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 64,
            };
            let pair = fabric.create_qp(domain, &mut attributes);
            let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
            let region = fabric.reg_mr(domain, memory.as_mut_ptr().cast(), 4096, access);
            End {
                fabric: fabric.clone(),
                context,
                domain,
                queue,
                pair,
                region,
                memory,
            }
        }
    }

    fn step(&self, state: c_uint, mask: c_uint, peer: u32) -> c_int {
        let mut attributes = IbvQpAttr {
            qp_state: state,
            dest_qp_num: peer,
            qp_access_flags: IBV_ACCESS_REMOTE_WRITE,
            ..IbvQpAttr::default()
        };
        // SAFETY: `End` uses its objects by the C functions' contracts, and destroys them only in
        // `drop`.
        unsafe {
            self.fabric
                .modify_qp(self.pair, &mut attributes, mask as c_int)
        }
    }

    fn connect(&self, peer: &End) {
        // SAFETY: `peer` keeps its queue pair until it is dropped.
        let peer = unsafe { (*peer.pair).qp_num };
        let (init, rtr, rts) = (0x39, 0x12_9181, 0x1_2e01);
        assert_eq!(self.step(IBV_QPS_INIT, init, 0), 0);
        assert_eq!(
            self.step(IBV_QPS_RTS, rts, peer),
            libc::EINVAL,
            "a step is left out"
        );
        assert_eq!(self.step(IBV_QPS_RTR, rtr & !IBV_QP_AV, peer), libc::EINVAL);
        assert_eq!(self.step(IBV_QPS_RTR, rtr, peer), 0);
        assert_eq!(self.step(IBV_QPS_RTS, rts, peer), 0);
    }

    fn post_receive(&self, id: u64) -> c_int {
        let mut work = IbvRecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
        };
        // SAFETY: `End` keeps its queue pair until it is dropped, and the list outlives the call.
        unsafe { inline::post_recv(self.pair, &mut work) }
    }

    /// Writes `bytes` bytes of this end's memory to the peer's memory, from byte `at` on.
    fn write(&self, peer: &End, bytes: u32, at: u64, opcode: c_uint, flags: c_uint) -> c_int {
        let mut piece = IbvSge {
            addr: self.memory.as_ptr().addr() as u64,
            length: bytes,
            // SAFETY: `End` keeps its memory region until it is dropped.
            lkey: unsafe { (*self.region).lkey },
        };
        // SAFETY: zero is valid for numbers and pointers. `End` keeps its queue pair until it is
        // dropped.
        unsafe {
            let mut work: IbvSendWr = std::mem::zeroed();
            (work.wr_id, work.opcode, work.send_flags) = (7, opcode, flags);
            (work.sg_list, work.num_sge) = (&raw mut piece, 1);
            work.imm_data = 99;
            work.rdma.remote_addr = peer.memory.as_ptr().addr() as u64 + at;
            work.rdma.rkey = (*peer.region).rkey;
            inline::post_send(self.pair, &mut work)
        }
    }

    fn poll(&self) -> Vec<IbvWc> {
        let mut found = [IbvWc::default(); 16];
        // SAFETY: `End` keeps its completion queue until it is dropped.
        let count = unsafe { inline::poll_cq(self.queue, &mut found) };
        found[..count as usize].to_vec()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: `End` owns these objects, and destroys users before the objects that they use.
        unsafe {
            assert_eq!(self.fabric.destroy_qp(self.pair), 0);
            assert_eq!(self.fabric.dereg_mr(self.region), 0);
            assert_eq!(self.fabric.destroy_cq(self.queue), 0);
            assert_eq!(self.fabric.dealloc_pd(self.domain), 0);
            assert_eq!(self.fabric.close_device(self.context), 0);
        }
    }
}

fn ends(sends: u32) -> (Arc<Fabric>, End, End) {
    let fabric = Fabric::new(vec![FakeDevice::roce("fake0", 1)]);
    let (one, two) = (End::open(&fabric, sends), End::open(&fabric, sends));
    one.connect(&two);
    two.connect(&one);
    (fabric, one, two)
}

const WRITE: c_uint = IBV_WR_RDMA_WRITE;
const IMMEDIATE: c_uint = IBV_WR_RDMA_WRITE_WITH_IMM;

#[test]
fn write_arrives_and_immediate_completes_a_receive() {
    let (fabric, mut one, two) = ends(8);
    one.memory[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(two.post_receive(5), 0);
    assert_eq!(one.write(&two, 64, 128, WRITE, 0), 0);
    assert_eq!(
        one.write(&two, 8, 0, IMMEDIATE, IBV_SEND_INLINE | IBV_SEND_SIGNALED),
        0
    );
    assert_eq!(two.memory[16..24], one.memory[..8]);
    let arrived = two.poll();
    assert_eq!(
        (arrived.len(), arrived[0].wr_id, arrived[0].imm_data),
        (1, 5, 99)
    );
    assert_eq!(
        (arrived[0].status, arrived[0].byte_len),
        (IBV_WC_SUCCESS, 8)
    );
    // Only signaled requests produce completions.
    assert_eq!(one.poll().len(), 1);
    // Held work is performed when the hold ends, with the inline data that it had when it was
    // posted.
    fabric.hold_work(true);
    one.memory[0] = 10;
    assert_eq!(one.write(&two, 8, 256, WRITE, IBV_SEND_INLINE), 0);
    one.memory[0] = 11;
    assert_eq!(two.memory[32], 0);
    fabric.hold_work(false);
    assert_eq!(two.memory[32], 10);
    drop((one, two));
    assert_eq!(fabric.leftovers(), [""; 0]);
}

#[test]
fn calls_that_a_device_refuses_fail() {
    let (fabric, one, two) = ends(2);
    assert_eq!(one.write(&two, 65, 0, WRITE, IBV_SEND_INLINE), libc::ENOMEM);
    assert_eq!(one.write(&two, 8, 0, WRITE, 0), 0);
    assert_eq!(one.write(&two, 8, 0, WRITE, 0), 0);
    // The send queue is full. No request was signaled, so no completion has freed an entry.
    assert_eq!(one.write(&two, 8, 0, WRITE, 0), libc::ENOMEM);
    for id in 0..4 {
        assert_eq!(two.post_receive(id), 0);
    }
    assert_eq!(two.post_receive(4), libc::ENOMEM);
    fabric.fail("reg_mr", 0, 1, libc::ENOMEM);
    // SAFETY: the call is refused, so no memory is registered.
    let refused = unsafe { fabric.reg_mr(one.domain, null_mut(), 1, 1) };
    assert!(refused.is_null());
    assert_eq!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::ENOMEM)
    );
    // SAFETY: the calls are refused, because other objects need these.
    unsafe {
        assert_eq!(fabric.destroy_cq(one.queue), libc::EBUSY);
        assert_eq!(fabric.dealloc_pd(one.domain), libc::EBUSY);
        assert_eq!(fabric.close_device(one.context), -1);
    }
}

#[test]
fn failed_write_completes_with_its_status_and_breaks_the_pair() {
    for (status, spoil) in [
        (IBV_WC_REM_ACCESS_ERR, 1),
        (IBV_WC_RNR_RETRY_EXC_ERR, 2),
        (IBV_WC_GENERAL_ERR, 3),
        (IBV_WC_RETRY_EXC_ERR, 4),
    ] {
        let (fabric, one, two) = ends(8);
        let (mut at, mut opcode) = (0, WRITE);
        match spoil {
            1 => at = 4090,
            2 => opcode = IMMEDIATE,
            3 => fabric.fail_work(0, status),
            _ => fabric.set_port(0, false),
        }
        assert_eq!(one.post_receive(3), 0);
        assert_eq!(one.write(&two, 8, at, opcode, 0), 0);
        let found = one.poll();
        assert_eq!((found[0].status, found[0].wr_id), (status, 7));
        assert_eq!((found[1].status, found[1].wr_id), (IBV_WC_WR_FLUSH_ERR, 3));
        assert_eq!(one.write(&two, 8, 0, WRITE, 0), 0);
        assert_eq!(one.poll()[0].status, IBV_WC_WR_FLUSH_ERR);
    }
}

#[test]
fn event_reaches_every_context_of_the_device() {
    let (fabric, one, two) = ends(2);
    fabric.set_port(0, false);
    for end in [&one, &two] {
        let mut event = IbvAsyncEvent {
            element: 0,
            event_type: 0,
        };
        // SAFETY: the context is open and `event` writable. An event is waiting, so the call does
        // not block.
        unsafe { assert_eq!(fabric.get_async_event(end.context, &mut event), 0) };
        assert_eq!((event.event_type, event.element), (IBV_EVENT_PORT_ERR, 1));
    }
}
