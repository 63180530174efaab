//! Queue pairs of reliable connections, and the writes that they carry.

use super::{Domain, Queue, done, gone, made};
use crate::error::{Error, Result};
use crate::sys::ibverbs::{self, *};
use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;

/// How two queue pairs reach each other.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Route {
    /// Own port.
    pub port: u8,
    /// `IBV_MTU_*` of the path.
    pub mtu: c_uint,
    /// How to address the peer.
    pub address: IbvAhAttr,
    /// The peer's queue pair.
    pub number: u32,
    /// First packet number of the peer.
    pub peer_packet: u32,
    /// Own first packet number.
    pub own_packet: u32,
    /// Patience for an answer: 4.096 us times two to this.
    pub timeout: u8,
    /// How often an unanswered packet is sent again.
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
    /// With places for `sends` and `recvs`, ready to take room for what comes through `port`.
    ///
    /// # Errors
    /// System, with the sizes.
    pub fn new(
        domain: &Arc<Domain>,
        queue: &Arc<Queue>,
        port: u8,
        (sends, recvs): (u32, u32),
    ) -> Result<Pair> {
        // What travels inline: header lines, small messages with them. A device that has less room
        // for it fetches them from memory.
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
        // SAFETY: alive.
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

    /// Its number, by which the peer addresses it.
    pub fn number(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).qp_num }
    }

    /// Connects it.
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
            // 0.64 ms; room for what comes is always there, so nobody waits for it.
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
        // SAFETY: alive, and readable.
        done(unsafe { device.api.modify_qp(self.raw, attributes, mask as c_int) }).map_err(
            |error| {
                Error::system(
                    format!("making a queue pair of {} {state}", device.name()),
                    error,
                )
            },
        )
    }

    /// Makes room for one more message, with this number on its completion.
    #[inline]
    pub fn post_room(&self, id: u64) -> io::Result<()> {
        let mut room = IbvRecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
        };
        // SAFETY: alive; the list has one piece, and no memory.
        done(unsafe { ibverbs::post_recv(self.raw, &mut room) })
    }

    /// Posts writes, in order, at one go.
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
            // A piece of no bytes would need a key all the same.
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
        // SAFETY: alive; the list ends with the last write, and lives through the call; the memory
        // by the caller's word.
        done(unsafe { ibverbs::post_send(self.raw, next) })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        gone("queue pair", unsafe {
            self.domain.device.api.destroy_qp(self.raw)
        });
    }
}

/// A write into a peer's memory.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Write {
    /// On its completion.
    pub id: u64,
    /// From where.
    pub piece: IbvSge,
    /// Where to.
    pub remote: u64,
    /// The key of that memory.
    pub remote_key: u32,
    /// A number that the peer gets once all of this write, and all writes before it, are in its
    /// memory.
    pub immediate: Option<u32>,
    /// Whether there is a completion if all goes well.
    pub signaled: bool,
}
