//! The operations of a context: posting, polling, and the transfer between peers.

use super::super::types::*;
use super::Fabric;
use super::state::{Context, Data, Posted, State};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the fabric of a context.
///
/// # Safety
/// The context is open.
unsafe fn fabric(context: *mut IbvContext) -> Option<Arc<Fabric>> {
    // SAFETY: every context of a fabric is the first field of a `Context`.
    unsafe { (*context.cast::<Context>()).fabric.upgrade() }
}

/// Simulates `ibv_poll_cq`.
pub(super) unsafe extern "C" fn poll_cq(queue: *mut IbvCq, most: c_int, into: *mut IbvWc) -> c_int {
    // SAFETY: the caller passes a queue that is not destroyed, which keeps its context open.
    let Some(fabric) = (unsafe { fabric((*queue).context) }) else {
        return -1;
    };
    let mut state = fabric.lock();
    let Some(there) = state.queues.get_mut(&queue.addr()) else {
        return -1;
    };
    if there.overrun {
        return -1;
    }
    let count = there.entries.len().min(most as usize);
    let taken: Vec<_> = there.entries.drain(..count).collect();
    for (index, (completion, frees)) in taken.into_iter().enumerate() {
        // SAFETY: the caller passes space for `most` entries.
        unsafe { *into.add(index) = completion };
        if let Some((pair, posted)) = frees
            && let Some(pair) = state.pairs.get_mut(&pair)
        {
            pair.freed = pair.freed.max(posted);
        }
    }
    count as c_int
}

/// Simulates `ibv_req_notify_cq`.
pub(super) unsafe extern "C" fn req_notify_cq(queue: *mut IbvCq, _solicited: c_int) -> c_int {
    // SAFETY: the caller passes a queue that is not destroyed, which keeps its context open.
    let Some(fabric) = (unsafe { fabric((*queue).context) }) else {
        return libc::EINVAL;
    };
    match fabric.lock().queues.get_mut(&queue.addr()) {
        Some(there) => {
            there.armed = true;
            0
        }
        None => libc::EINVAL,
    }
}

/// Simulates `ibv_post_recv`.
pub(super) unsafe extern "C" fn post_recv(
    pair: *mut IbvQp,
    work: *mut IbvRecvWr,
    bad: *mut *mut IbvRecvWr,
) -> c_int {
    // SAFETY: the caller passes a queue pair that is not destroyed, and a readable list.
    unsafe {
        let (Some(fabric), number) = (fabric((*pair).context), (*pair).qp_num) else {
            return libc::EINVAL;
        };
        let mut state = fabric.lock();
        let mut next = work;
        while !next.is_null() {
            let failure = state.enter("post_recv").err();
            let Some(there) = state.pairs.get_mut(&number) else {
                return libc::EINVAL;
            };
            let failure = match there.state {
                IBV_QPS_RESET => Some(libc::EINVAL),
                _ if there.receives.len() == there.cap.max_recv_wr as usize => Some(libc::ENOMEM),
                _ => failure,
            };
            if let Some(error) = failure {
                *bad = next;
                return error;
            }
            there.receives.push_back((*next).wr_id);
            if there.state == IBV_QPS_ERR {
                flush_receives(&mut state, number);
            }
            next = (*next).next;
        }
        0
    }
}

/// Simulates `ibv_post_send`.
pub(super) unsafe extern "C" fn post_send(
    pair: *mut IbvQp,
    work: *mut IbvSendWr,
    bad: *mut *mut IbvSendWr,
) -> c_int {
    // SAFETY: the caller passes a queue pair that is not destroyed, and a readable list.
    unsafe {
        let (Some(fabric), number) = (fabric((*pair).context), (*pair).qp_num) else {
            return libc::EINVAL;
        };
        let mut state = fabric.lock();
        let mut next = work;
        while !next.is_null() {
            let failure = state.enter("post_send").err();
            let posted = match (failure, read_work(&state, number, &*next)) {
                (Some(error), _) | (_, Err(error)) => {
                    *bad = next;
                    return error;
                }
                (None, Ok(posted)) => posted,
            };
            if let Some(there) = state.pairs.get_mut(&number) {
                there.posted += 1;
                there.pending.push_back(posted);
            }
            next = (*next).next;
        }
        if !state.holds_work {
            run(&mut state, number);
        }
        0
    }
}

/// Checks a request as a provider does when it is posted, and copies inline data.
///
/// # Safety
/// The request's pieces are readable, and so is their memory if it is inline.
unsafe fn read_work(state: &State, number: u32, work: &IbvSendWr) -> Result<Posted, c_int> {
    let pair = state.pairs.get(&number).ok_or(libc::EINVAL)?;
    if !matches!(pair.state, IBV_QPS_RTS | IBV_QPS_ERR) {
        return Err(libc::EINVAL);
    }
    if pair.posted - pair.freed >= u64::from(pair.cap.max_send_wr)
        || work.num_sge as u32 > pair.cap.max_send_sge
    {
        return Err(libc::ENOMEM);
    }
    let pieces = match work.num_sge {
        0 => &[],
        // SAFETY: the caller passes a request with `count` pieces.
        count => unsafe { std::slice::from_raw_parts(work.sg_list, count as usize) },
    };
    let data = if work.send_flags & IBV_SEND_INLINE != 0 {
        let mut bytes = Vec::new();
        for piece in pieces {
            // SAFETY: the caller passes readable inline memory.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize)
            });
        }
        if bytes.len() > pair.cap.max_inline_data as usize {
            return Err(libc::ENOMEM);
        }
        Data::Inline(bytes)
    } else {
        Data::Pieces(pieces.to_vec())
    };
    Ok(Posted {
        id: work.wr_id,
        opcode: work.opcode,
        signaled: work.send_flags & IBV_SEND_SIGNALED != 0,
        immediate: work.imm_data,
        remote: work.rdma.remote_addr,
        rkey: work.rdma.rkey,
        data,
    })
}

/// Performs the pending work of all queue pairs.
pub(super) fn run_all(state: &mut State) {
    let numbers: Vec<u32> = state.pairs.keys().copied().collect();
    for number in numbers {
        run(state, number);
    }
}

/// Performs the pending work of a queue pair, in order.
fn run(state: &mut State, number: u32) {
    while let Some(pair) = state.pairs.get_mut(&number) {
        let Some(work) = pair.pending.pop_front() else {
            return;
        };
        let done = pair.posted - pair.pending.len() as u64;
        let queue = pair.send_queue;
        let status = match pair.state {
            IBV_QPS_ERR => IBV_WC_WR_FLUSH_ERR,
            _ => transfer(state, number, &work),
        };
        if status != IBV_WC_SUCCESS || work.signaled {
            let completion = IbvWc {
                wr_id: work.id,
                status,
                opcode: IBV_WC_RDMA_WRITE,
                qp_num: number,
                ..IbvWc::default()
            };
            state.complete(queue, (completion, Some((number, done))));
        }
        if !matches!(status, IBV_WC_SUCCESS | IBV_WC_WR_FLUSH_ERR) {
            break_pair(state, number);
        }
    }
}

/// Moves a queue pair to the error state: its pending requests complete with a flush error.
pub(super) fn break_pair(state: &mut State, number: u32) {
    if let Some(pair) = state.pairs.get_mut(&number) {
        pair.state = IBV_QPS_ERR;
    }
    flush_receives(state, number);
    run(state, number);
}

fn flush_receives(state: &mut State, number: u32) {
    let Some(pair) = state.pairs.get_mut(&number) else {
        return;
    };
    let (queue, receives) = (pair.recv_queue, std::mem::take(&mut pair.receives));
    for wr_id in receives {
        let completion = IbvWc {
            wr_id,
            status: IBV_WC_WR_FLUSH_ERR,
            opcode: IBV_WC_RECV,
            qp_num: number,
            ..IbvWc::default()
        };
        state.complete(queue, (completion, None));
    }
}

/// Transfers one request to the peer. Returns the status of its completion.
fn transfer(state: &mut State, number: u32, work: &Posted) -> c_uint {
    if let Some(at) = state.work_failures.iter().position(|(skip, _)| *skip == 0) {
        return state.work_failures.remove(at).1;
    }
    for (skip, _) in &mut state.work_failures {
        *skip -= 1;
    }
    let pair = &state.pairs[&number];
    let up = |device: usize| state.devices[device].port.state == IBV_PORT_ACTIVE;
    let answers = state.pairs.get(&pair.peer).filter(|peer| {
        matches!(peer.state, IBV_QPS_RTR | IBV_QPS_RTS) && peer.peer == number && up(peer.device)
    });
    let Some(peer) = answers.filter(|_| up(pair.device)) else {
        return IBV_WC_RETRY_EXC_ERR;
    };
    let bytes: Vec<u8> = match &work.data {
        Data::Inline(bytes) => bytes.clone(),
        Data::Pieces(pieces) => {
            let mut bytes = Vec::new();
            for piece in pieces {
                let contains_piece = |region: &&super::state::Memory| {
                    region.domain == pair.domain
                        && contains(
                            region.address,
                            region.bytes,
                            piece.addr,
                            piece.length as usize,
                        )
                };
                if state
                    .regions
                    .get(&piece.lkey)
                    .filter(contains_piece)
                    .is_none()
                {
                    return IBV_WC_LOC_PROT_ERR;
                }
                // SAFETY: the piece lies in a registered region, whose owner keeps it mapped.
                bytes.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize)
                });
            }
            bytes
        }
    };
    let allowed = state.regions.get(&work.rkey).filter(|region| {
        region.domain == peer.domain
            && region.access as c_uint & IBV_ACCESS_REMOTE_WRITE != 0
            && peer.access & IBV_ACCESS_REMOTE_WRITE != 0
            && contains(region.address, region.bytes, work.remote, bytes.len())
    });
    if !bytes.is_empty() && allowed.is_none() {
        let there = pair.peer;
        break_pair(state, there);
        return IBV_WC_REM_ACCESS_ERR;
    }
    write(work.remote, &bytes);
    if work.opcode != IBV_WR_RDMA_WRITE_WITH_IMM {
        return IBV_WC_SUCCESS;
    }
    let there = pair.peer;
    let Some(pair) = state.pairs.get_mut(&there) else {
        return IBV_WC_RETRY_EXC_ERR;
    };
    let Some(wr_id) = pair.receives.pop_front() else {
        return IBV_WC_RNR_RETRY_EXC_ERR;
    };
    let completion = IbvWc {
        wr_id,
        status: IBV_WC_SUCCESS,
        opcode: IBV_WC_RECV_RDMA_WITH_IMM,
        byte_len: bytes.len() as u32,
        imm_data: work.immediate,
        wc_flags: IBV_WC_WITH_IMM,
        qp_num: there,
        ..IbvWc::default()
    };
    let queue = pair.recv_queue;
    state.complete(queue, (completion, None));
    IBV_WC_SUCCESS
}

fn contains(address: u64, bytes: usize, at: u64, length: usize) -> bool {
    at >= address && at - address <= bytes as u64 && length as u64 <= bytes as u64 - (at - address)
}

/// Writes like a device: an aligned word as a whole, because a peer may be polling it.
fn write(at: u64, bytes: &[u8]) {
    if let (Ok(word), 0) = (<[u8; 8]>::try_from(bytes), at % 8) {
        // SAFETY: the word is aligned and lies in a registered region; the peer polls it as an
        // atomic.
        let place = unsafe { &*(at as *const AtomicU64) };
        return place.store(u64::from_ne_bytes(word), Ordering::Release);
    }
    // SAFETY: the bytes lie in a registered region; the peer reads them after the completion.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
}
