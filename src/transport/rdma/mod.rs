//! Ranks of different hosts over RDMA: reliable connections of InfiniBand and RoCE, through
//! libibverbs. Slots lie in registered memory of both sides, a fixed pool for each port; devices
//! write them without the peer's doing. See `connection` for what is written when, and the manual's
//! page on memory ordering for why that is enough.

pub(super) mod connect;
mod connection;
mod endpoint;
mod ports;
mod qp_flow;
mod status;
#[cfg(all(test, not(loom)))]
mod tests;
mod verbs;

pub(super) use endpoint::Endpoint;
pub(super) use ports::{AddressKind, Ports};

use super::{Header, RecvEnd, SendEnd};
use crate::error::Result;
use std::sync::Arc;

/// Sends to one peer on one channel.
#[derive(Debug)]
pub(super) struct RdmaSend {
    endpoint: Arc<Endpoint>,
    index: usize,
}

impl SendEnd for RdmaSend {
    fn ready(&mut self) -> Result<bool> {
        self.endpoint.connection(self.index).can_send()
    }

    fn slot(&mut self) -> &mut [u8] {
        let slot = self.endpoint.connection(self.index).outgoing();
        // SAFETY: a slot of the endpoint's memory that is ours until it is published, and there is
        // one sender.
        unsafe { &mut *slot }
    }

    fn written(&self) -> &[u8] {
        let slot = self.endpoint.connection(self.index).outgoing();
        // SAFETY: as for `slot`.
        unsafe { &*slot }
    }

    fn publish(&mut self, header: Header) {
        self.endpoint.connection(self.index).publish(header);
    }

    fn flushed(&mut self) -> Result<bool> {
        self.endpoint.connection(self.index).drained()
    }
}

/// Receives from one peer on one channel.
#[derive(Debug)]
pub(super) struct RdmaRecv {
    endpoint: Arc<Endpoint>,
    index: usize,
}

impl RecvEnd for RdmaRecv {
    fn ready(&mut self) -> Result<bool> {
        self.endpoint.connection(self.index).can_receive()
    }

    fn header(&self) -> Header {
        self.endpoint.connection(self.index).header()
    }

    fn payload(&self) -> &[u8] {
        let payload = self.endpoint.connection(self.index).incoming();
        // SAFETY: a slot of the endpoint's memory that is ours until it is released.
        unsafe { &*payload }
    }

    fn release(&mut self) {
        self.endpoint.connection(self.index).release();
    }
}
