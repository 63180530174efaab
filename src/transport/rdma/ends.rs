//! The ends of an RDMA connection, which share the rank's endpoint with its waiter.

use super::Endpoint;
use crate::error::Result;
use crate::transport::{Header, RecvEnd, SendEnd};
use std::sync::Arc;

/// Sends to one peer on one channel.
#[derive(Debug)]
pub(super) struct RdmaSend {
    pub endpoint: Arc<Endpoint>,
    /// Index of the connection in the endpoint.
    pub index: usize,
}

impl SendEnd for RdmaSend {
    fn ready(&mut self) -> Result<bool> {
        self.endpoint.connection(self.index).can_send()
    }

    fn slot(&mut self) -> &mut [u8] {
        let slot = self.endpoint.connection(self.index).outgoing();
        // SAFETY: `Connection` hands the slot to nobody else before `publish`, the endpoint keeps the memory
        // mapped, and `&mut self` excludes a second borrow.
        unsafe { &mut *slot }
    }

    fn written(&self) -> &[u8] {
        let slot = self.endpoint.connection(self.index).outgoing();
        // SAFETY: `Connection` hands the slot to nobody else before `publish`, the endpoint keeps the memory
        // mapped, and `&self` excludes a writer.
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
    pub endpoint: Arc<Endpoint>,
    /// Index of the connection in the endpoint.
    pub index: usize,
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
        // SAFETY: the peer gets the slot back with `release`, which needs `&mut self`, and the endpoint keeps
        // the memory mapped.
        unsafe { &*payload }
    }

    fn release(&mut self) {
        self.endpoint.connection(self.index).release();
    }
}
