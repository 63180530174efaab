//! Boxes of pairs that have no other way: in host memory, which both GPUs map.
//!
//! The reader owns them, as it owns its inbox on the GPU. Between processes they lie in a sealed
//! memfd that is handed over as the shm transport hands over its regions; within one process by
//! reference. Either way both sides register the memory with their GPU.

use super::GpuLinks;
use super::connect::Connecting;
use super::gathered_round::MemoryHandle;
use super::local_registry::{self, Offer};
use super::paths::PathFailures;
use crate::bootstrap::auth::Listener;
use crate::error::{Error, Result};
use crate::gpu::{Context, IPC_HANDLE_BYTES, PinnedMemory};
use crate::mem::Region;
use crate::sys::memory::PAGE;
use crate::sys::socket::Address;
use crate::transport::mesh::SocketMesh;
use crate::transport::shm;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// What the sockets are for, in messages and in the key.
const PURPOSE: &str = "cuda";

/// What keeps boxes in host memory alive.
#[derive(Debug)]
pub(super) struct HostPeerBuffers {
    _registered: Vec<PinnedMemory>,
    _own: Arc<LocalBuffers>,
    _others: Vec<Arc<LocalBuffers>>,
}

/// One reader's boxes, as the ranks of its process share them.
#[derive(Debug)]
pub(super) struct LocalBuffers {
    boxes: Vec<PinnedMemory>,
}

/// What a rank holds ready before it knows the others' addresses.
struct Prepared {
    buffers: Arc<LocalBuffers>,
    offer: Option<Offer>,
    name: [u8; 16],
    local: Option<(Listener, OwnedFd)>,
}

/// Gives each pair with a failed path its boxes. All ranks call it together if there is one at all.
pub(super) fn connect(
    connecting: &Connecting<'_>,
    links: &mut GpuLinks,
    failures: &PathFailures,
) -> Result<()> {
    let (me, peers) = (connecting.me, connecting.peers);
    let apart = failures.apart(me, peers.len());
    let stride = links.shape.bytes().next_multiple_of(PAGE);
    let prepared = Prepared::new(connecting, &apart, stride);
    let part = prepared.as_ref().map(|prepared| prepared.part().encode());
    let parts = connecting.round(part.map_err(Error::clone))?;
    let mut prepared = prepared?;
    if apart.is_empty() {
        return connecting.meet();
    }

    for (&peer, memory) in apart.iter().zip(&prepared.buffers.boxes) {
        links.inbox[peer] = memory.address();
    }
    let mut others = Vec::new();
    let mut abroad = Vec::new();
    for &peer in &apart {
        let exported = MemoryHandle::decode(&parts[peer], &peers[peer])?;
        if connecting.share_process(peer) {
            let buffers: Arc<LocalBuffers> = local_registry::take(exported.offer)
                .map_err(|error| error.context(&peers[peer]))?;
            let theirs = failures.apart(peer, peers.len());
            let index = theirs.iter().position(|&rank| rank == me);
            let memory = index
                .and_then(|index| buffers.boxes.get(index))
                .ok_or_else(|| Error::internal(format!("{} has no box for us", peers[peer])))?;
            links.outbox[peer] = memory.address();
            others.push(buffers);
        } else {
            let mut name = [0; 16];
            let handle = exported.handle.unwrap_or([0; IPC_HANDLE_BYTES]);
            name.copy_from_slice(&handle[..16]);
            abroad.push((peer, name));
        }
    }
    let mut registered = Vec::new();
    if let Some((listener, memory)) = prepared.local.take() {
        let bytes = stride * (peers.len() - 1);
        let regions = shm::exchange(connecting.mesh(listener, &abroad), &memory, bytes)?;
        for (peer, region) in regions {
            let at = stride * index_of(peer, me);
            let memory = pin(connecting.gpu, region, at, stride)
                .map_err(|error| error.context(format!("host memory of {}", peers[peer])))?;
            links.outbox[peer] = memory.address();
            registered.push(memory);
        }
    }
    links.pinned_bytes += apart.len() * stride;
    links.host = Some(HostPeerBuffers {
        _registered: registered,
        _own: prepared.buffers.clone(),
        _others: others,
    });
    // Offers have served every rank when all have met.
    let met = connecting.meet();
    drop(prepared);
    met
}

impl Prepared {
    fn new(connecting: &Connecting<'_>, apart: &[usize], stride: usize) -> Result<Prepared> {
        let (me, nranks) = (connecting.me, connecting.peers.len());
        let bytes = stride * (nranks - 1);
        let abroad = apart.iter().any(|&peer| !connecting.share_process(peer));
        let mut name = [0; 16];
        let mut local = None;
        // Pages that nobody touches or registers take no memory.
        let region = match abroad {
            false => Region::heap(bytes)?,
            true => {
                let (region, memory) = Region::shareable(bytes)?;
                getrandom::fill(&mut name)
                    .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
                local = Some((Listener::bind_local(name)?, memory));
                region
            }
        };
        let mut boxes = Vec::new();
        for &peer in apart {
            let at = stride * index_of(me, peer);
            boxes.push(pin(connecting.gpu, region.clone(), at, stride)?);
        }
        let buffers = Arc::new(LocalBuffers { boxes });
        let at_home = apart.iter().any(|&peer| connecting.share_process(peer));
        Ok(Prepared {
            offer: at_home.then(|| Offer::new(buffers.clone())),
            buffers,
            name,
            local,
        })
    }

    fn part(&self) -> MemoryHandle {
        let mut handle = [0; IPC_HANDLE_BYTES];
        handle[..16].copy_from_slice(&self.name);
        MemoryHandle {
            offer: self.offer.as_ref().map_or(0, |offer| offer.number),
            handle: self.local.is_some().then_some(handle),
            refusal: String::new(),
        }
    }
}

impl<'a> Connecting<'a> {
    fn mesh(&'a self, listener: Listener, abroad: &[(usize, [u8; 16])]) -> SocketMesh<'a> {
        let addresses = abroad
            .iter()
            .map(|&(peer, name)| (peer, Address::Local(name)));
        SocketMesh {
            purpose: PURPOSE,
            key: self.context.exchange.key(PURPOSE),
            me: self.me,
            peers: self.peers,
            listener,
            addresses: addresses.collect(),
            channels: 1,
            sockets: 1,
            fault: self.context.fault,
            deadline: self.context.deadline,
        }
    }
}

/// Lets the GPU use `bytes` bytes at `at` of a region.
fn pin(gpu: &Arc<Context>, region: Arc<Region>, at: usize, bytes: usize) -> Result<PinnedMemory> {
    let place = NonNull::new(region.place(at, bytes, PAGE))
        .ok_or_else(|| Error::internal("a region at address 0"))?;
    // SAFETY: in bounds by `place`; the region is mapped, for reading and writing, while the
    // owner lives.
    unsafe { PinnedMemory::register(gpu, place, bytes, region) }
}

/// Where in `reader`'s region the box from `writer` is.
fn index_of(reader: usize, writer: usize) -> usize {
    writer - usize::from(writer > reader)
}
