//! Queue pairs of reliable connections, and their RDMA writes.

use super::{Domain, Queue, destroyed, done, made};
use crate::error::{Error, Result};
use crate::sys::ibverbs::{self, *};
use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;

/// The attributes by which a queue pair reaches its peer.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Route {
    /// Port of this rank.
    pub port: u8,
    /// `IBV_MTU_*` of the path.
    pub mtu: c_uint,
    /// Address of the peer.
    pub address: IbvAhAttr,
    /// Number of the peer's queue pair.
    pub number: u32,
    /// First packet number of the peer.
    pub peer_packet: u32,
    /// First packet number of this rank.
    pub own_packet: u32,
    /// Exponent of the time to wait for an answer: 4.096 us times two to this power.
    pub timeout: u8,
    /// Retransmissions of an unanswered packet.
    pub retries: u8,
}

/// A queue pair of a reliable connection.
#[derive(Debug)]
pub(in super::super) struct Pair {
    domain: Arc<Domain>,
    _queue: Arc<Queue>,
    raw: *mut IbvQp,
    inline: u32,
}

impl Pair {
    /// Creates a queue pair at `port` with queues of `sends` and `recvs` requests. It accepts receive requests
    /// at once.
    ///
    /// # Errors
    /// System, with the sizes.
    pub fn new(
        domain: &Arc<Domain>,
        queue: &Arc<Queue>,
        port: u8,
        (sends, recvs): (u32, u32),
    ) -> Result<Pair> {
        // Header lines and small messages travel inline. A device that has less inline room fetches them from
        // memory.
        let mut pair = Pair::make(domain, queue, (sends, recvs), 128);
        if pair.is_err() {
            pair = Pair::make(domain, queue, (sends, recvs), 0);
        }
        let pair = pair?;
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_INIT,
            port_num: port,
            qp_access_flags: IBV_ACCESS_REMOTE_WRITE,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        pair.step(&mut attributes, mask, "init")?;
        Ok(pair)
    }

    fn make(
        domain: &Arc<Domain>,
        queue: &Arc<Queue>,
        (sends, recvs): (u32, u32),
        inline: u32,
    ) -> Result<Pair> {
        let mut attributes = IbvQpInitAttr {
            qp_context: null_mut(),
            send_cq: queue.raw,
            recv_cq: queue.raw,
            srq: null_mut(),
            cap: IbvQpCap {
                max_send_wr: sends,
                max_recv_wr: recvs,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: `domain` and `queue` keep their objects allocated.
        let raw = unsafe { domain.device.api.create_qp(domain.raw, &mut attributes) };
        let raw = made(raw, || {
            format!(
                "a queue pair of {} with {sends} sends and {recvs} receives (fewer connections \
                 need fewer: lower CINCH_CHANNELS or CINCH_IB_QPS)",
                domain.device.name()
            )
        })?;
        Ok(Pair {
            domain: domain.clone(),
            _queue: queue.clone(),
            raw,
            inline,
        })
    }

    /// Returns the number by which the peer addresses this queue pair.
    pub fn number(&self) -> u32 {
        // SAFETY: `Pair` keeps `raw` allocated; the field does not change.
        unsafe { (*self.raw).qp_num }
    }

    /// Connects the queue pair.
    ///
    /// # Errors
    /// System, with the step that failed.
    pub fn connect(&self, route: &Route) -> Result<()> {
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_RTR,
            path_mtu: route.mtu,
            rq_psn: route.peer_packet,
            dest_qp_num: route.number,
            ah_attr: IbvAhAttr {
                port_num: route.port,
                ..route.address
            },
            max_dest_rd_atomic: 1,
            // 0.64 ms. Receive requests never run out, so the timer never runs.
            min_rnr_timer: 12,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.step(&mut attributes, mask, "ready to receive")?;
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_RTS,
            sq_psn: route.own_packet,
            timeout: route.timeout,
            retry_cnt: route.retries,
            rnr_retry: route.retries,
            max_rd_atomic: 1,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.step(&mut attributes, mask, "ready to send")
    }

    fn step(&self, attributes: &mut IbvQpAttr, mask: c_uint, state: &str) -> Result<()> {
        let device = &self.domain.device;
        // SAFETY: `Pair` keeps `raw` allocated, and `attributes` is a reference.
        done(unsafe { device.api.modify_qp(self.raw, attributes, mask as c_int) }).map_err(
            |error| {
                Error::system(
                    format!("making a queue pair of {} {state}", device.name()),
                    error,
                )
            },
        )
    }

    /// Posts a receive request without memory, whose completion carries `id`.
    #[inline]
    pub fn post_room(&self, id: u64) -> io::Result<()> {
        let mut room = IbvRecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
        };
        // SAFETY: `Pair` keeps `raw` allocated; the list has one request, which names no memory.
        done(unsafe { ibverbs::post_recv(self.raw, &mut room) })
    }

    /// Posts writes, in order, with one doorbell.
    ///
    /// # Safety
    /// Pieces that are not inline lie in registered memory that outlives the queue pair.
    #[inline]
    pub unsafe fn post(&self, writes: &mut [Write]) -> io::Result<()> {
        const MOST: usize = 2;
        assert!(!writes.is_empty() && writes.len() <= MOST);
        let mut works: [IbvSendWr; MOST] = std::array::from_fn(|_| IbvSendWr {
            wr_id: 0,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 1,
            opcode: IBV_WR_RDMA_WRITE,
            send_flags: 0,
            imm_data: 0,
            rdma: IbvSendWrRdma::default(),
            _rest_of_wr: [0; 2],
            qp_type: 0,
            bind_mw: [0; 6],
        });
        let mut next: *mut IbvSendWr = null_mut();
        for (work, write) in works.iter_mut().zip(writes.iter_mut()).rev() {
            work.wr_id = write.id;
            work.next = next;
            // A piece of no bytes is left out, because the device would check its key.
            work.sg_list = &raw mut write.piece;
            work.num_sge = c_int::from(write.piece.length > 0);
            work.rdma.remote_addr = write.remote;
            work.rdma.rkey = write.remote_key;
            if let Some(immediate) = write.immediate {
                work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                work.imm_data = immediate.to_be();
            }
            if write.signaled {
                work.send_flags |= IBV_SEND_SIGNALED;
            }
            if (1..=self.inline).contains(&write.piece.length) {
                work.send_flags |= IBV_SEND_INLINE;
            }
            next = work;
        }
        // SAFETY: `Pair` keeps `raw` allocated. The list ends with the last write and outlives the call. The
        // caller keeps the pieces in registered memory.
        done(unsafe { ibverbs::post_send(self.raw, next) })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: `Pair` owns `raw`, and destroys it only here.
        destroyed("queue pair", unsafe {
            self.domain.device.api.destroy_qp(self.raw)
        });
    }
}

/// A work request that writes local memory into registered memory of the peer, without the peer's processor.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Write {
    /// Number that the completion carries.
    pub id: u64,
    /// Local memory from which the data is read.
    pub piece: IbvSge,
    /// Address at the peer.
    pub remote: u64,
    /// Key of the memory at the peer.
    pub remote_key: u32,
    /// A number that the peer receives once this write and all writes before it are in its memory.
    pub immediate: Option<u32>,
    /// Whether success causes a completion.
    pub signaled: bool,
}
