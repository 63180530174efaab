//! Peer buffers in pinned host memory, for pairs of one host without peer access.
//!
//! The reader owns its peer buffers, as it owns its inbox on the GPU. Ranks of one process share them by a
//! reference. Other processes map a sealed memfd, which the shm transport passes over a socket. Both ranks of
//! a pair register the memory with their GPU.

use super::GpuLinks;
use super::local_registry::{self, Registration};
use super::paths::PathFailures;
use super::round_messages::MemoryHandle;
use super::setup::LinkSetup;
use crate::bootstrap::auth::Listener;
use crate::error::{Error, Result};
use crate::gpu::{Context, IPC_HANDLE_BYTES, PinnedMemory};
use crate::mem::Region;
use crate::sys::memory::PAGE;
use crate::transport::mesh::SocketMesh;
use crate::transport::shm;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Purpose of the sockets. Errors name it, and it keeps the key of these sockets distinct from the
/// keys of other sockets.
const PURPOSE: &str = "cuda";

/// Keeps peer buffers in host memory mapped and registered: those that this rank owns, and those
/// that its peers own.
#[derive(Debug)]
pub(super) struct HostPeerBuffers {
    _mapped: Vec<PinnedMemory>,
    _own: Arc<HostInbox>,
    _local: Vec<Arc<HostInbox>>,
}

/// The peer buffers that one reader owns, in the order of the writers' ranks.
#[derive(Debug)]
struct HostInbox(Vec<PinnedMemory>);

/// The peer buffers of this rank, ready for its peers to map.
struct Exported {
    inbox: Arc<HostInbox>,
    registration: Option<Registration>,
    /// Name of the socket that passes the memfd.
    name: [u8; 16],
    /// The socket and the memfd, if a peer is in another process.
    shared: Option<(Listener, OwnedFd)>,
}

/// Connects all pairs in `failures`. All ranks call it together if any pair has failed.
pub(super) fn connect(
    setup: &LinkSetup<'_>,
    links: &mut GpuLinks,
    failures: &PathFailures,
) -> Result<()> {
    let (me, peers) = (setup.me, setup.peers);
    let writers = failures.in_host_memory(me, peers.len());
    let stride = links.shape.bytes().next_multiple_of(PAGE);
    let exported = Exported::new(setup, &writers, stride);
    let handle = exported.as_ref().map(|own| own.handle().encode());
    let handles = setup.round(handle.map_err(Error::clone))?;
    let mut exported = exported?;
    if writers.is_empty() {
        return setup.barrier();
    }

    for (&peer, memory) in writers.iter().zip(&exported.inbox.0) {
        links.inbox[peer] = memory.address();
    }
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    for &peer in &writers {
        let handle = MemoryHandle::decode(&handles[peer], &peers[peer])?;
        if setup.shares_process(peer) {
            let inbox: Arc<HostInbox> = local_registry::lookup(handle.registration)
                .map_err(|error| error.context(&peers[peer]))?;
            let order = failures.in_host_memory(peer, peers.len());
            let index = order.iter().position(|&rank| rank == me);
            let memory = index.and_then(|index| inbox.0.get(index)).ok_or_else(|| {
                Error::internal(format!("{} has no peer buffer for us", peers[peer]))
            })?;
            links.outbox[peer] = memory.address();
            local.push(inbox);
        } else {
            let ipc = handle.ipc.unwrap_or([0; IPC_HANDLE_BYTES]);
            remote.push((peer, std::array::from_fn(|at| ipc[at])));
        }
    }
    let mut mapped = Vec::new();
    if let Some((listener, memfd)) = exported.shared.take() {
        let bytes = stride * (peers.len() - 1);
        for (peer, region) in shm::exchange(mesh(setup, listener, &remote), &memfd, bytes)? {
            let at = stride * index_of(peer, me);
            let memory = pin(setup.gpu, region, at, stride)
                .map_err(|error| error.context(format!("host memory of {}", peers[peer])))?;
            links.outbox[peer] = memory.address();
            mapped.push(memory);
        }
    }
    links.pinned_bytes += writers.len() * stride;
    links.host = Some(HostPeerBuffers {
        _mapped: mapped,
        _own: exported.inbox.clone(),
        _local: local,
    });
    // The entry in the local registry must exist until every rank has looked it up.
    let all_connected = setup.barrier();
    drop(exported);
    all_connected
}

impl Exported {
    fn new(setup: &LinkSetup<'_>, writers: &[usize], stride: usize) -> Result<Exported> {
        // The region has address space for a peer buffer from every other rank. Pages that no rank
        // touches or registers take no memory.
        let bytes = stride * (setup.nranks() - 1);
        let any_local = writers.iter().any(|&peer| setup.shares_process(peer));
        let any_remote = writers.iter().any(|&peer| !setup.shares_process(peer));
        let mut name = [0; 16];
        let (region, shared) = match any_remote {
            false => (Region::heap(bytes)?, None),
            true => {
                let (region, memfd) = Region::shareable(bytes)?;
                getrandom::fill(&mut name)
                    .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
                let address = setup.context.exchange.local_address(name);
                (region, Some((Listener::bind_local(address)?, memfd)))
            }
        };
        let pin = |&peer: &usize| {
            let at = stride * index_of(setup.me, peer);
            pin(setup.gpu, region.clone(), at, stride)
        };
        let inbox = Arc::new(HostInbox(writers.iter().map(pin).collect::<Result<_>>()?));
        Ok(Exported {
            registration: any_local.then(|| Registration::new(inbox.clone())),
            inbox,
            name,
            shared,
        })
    }

    fn handle(&self) -> MemoryHandle {
        let mut ipc = [0; IPC_HANDLE_BYTES];
        ipc[..16].copy_from_slice(&self.name);
        MemoryHandle {
            registration: self.registration.as_ref().map_or(0, |entry| entry.number),
            ipc: self.shared.is_some().then_some(ipc),
            refusal: String::new(),
        }
    }
}

/// Describes the sockets to `peers`, which are ranks of other processes. Each comes with the name
/// of its listener.
fn mesh<'a>(
    setup: &'a LinkSetup<'_>,
    listener: Listener,
    peers: &[(usize, [u8; 16])],
) -> SocketMesh<'a> {
    let addresses = peers
        .iter()
        .map(|&(peer, name)| (peer, setup.context.exchange.local_address(name)));
    SocketMesh {
        purpose: PURPOSE,
        key: setup.context.exchange.key(PURPOSE),
        encrypts: false,
        me: setup.me,
        peers: setup.peers,
        listener,
        addresses: addresses.collect(),
        nearer: Vec::new(),
        channels: 1,
        sockets: 1,
        fault: setup.context.fault,
        deadline: setup.context.deadline,
    }
}

/// Registers `bytes` bytes at offset `at` of a region with the GPU.
fn pin(gpu: &Arc<Context>, region: Arc<Region>, at: usize, bytes: usize) -> Result<PinnedMemory> {
    let place = NonNull::new(region.place(at, bytes, PAGE))
        .ok_or_else(|| Error::internal("a region at address 0"))?;
    // SAFETY: `place` checks the bounds. `PinnedMemory` owns the region, which stays mapped for reading
    // and writing until the registration ends.
    unsafe { PinnedMemory::register(gpu, place, bytes, region) }
}

/// Returns the index of the peer buffer from `writer` in the region of `reader`.
fn index_of(reader: usize, writer: usize) -> usize {
    writer - usize::from(writer > reader)
}
