//! Ranks of different hosts: one socket for each pair and channel, or several, message by message in
//! turn, where one stream does not fill a fast link. On a link that one stream fills, more are worse:
//! the bytes of a message go out between those of the one before it, which arrives later for that,
//! and so does everything that waits for it.

mod pump;

use super::mesh::{SocketId, SocketMesh};
use super::{Header, RecvEnd, RecvInto, SendEnd, SendFrom};
use crate::error::Result;
use crate::mem::{Consumer, FifoPlaces, FifoShape, Producer, Region};
use crate::sys::socket::{self, Interest, Socket};
use pump::Pump;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Purpose of the sockets, in errors and in the key.
pub(super) const PURPOSE: &str = "tcp";

/// Opens the sockets of `mesh`. Their buffer sizes stay the kernel's choice, which follows the path.
///
/// # Errors
/// As for [`SocketMesh::open`].
pub(super) fn open(mesh: SocketMesh<'_>) -> Result<HashMap<SocketId, Socket>> {
    let sockets = mesh.open()?;
    sockets.values().try_for_each(|it| socket::keep_alive(it))?;
    Ok(sockets)
}

/// The pump of one pair on one channel, as its two ends and the waiter share it. They belong to
/// one rank, so the lock is free unless a program polls ends from several threads; beside a
/// system call it costs nothing.
#[derive(Clone, Debug)]
pub(super) struct SharedPump(Arc<Mutex<Pump>>);

impl SharedPump {
    fn lock(&self) -> MutexGuard<'_, Pump> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what can be moved, both ways. A broken connection is the business of its ends: a
    /// peer that has left must not fail ranks that expect nothing from it.
    pub fn progress(&self) {
        let mut pump = self.lock();
        pump.send();
        pump.receive(true);
    }

    /// Looks whether the peer's host still answers. Costs a system call a socket.
    pub fn listen_for_life(&self) {
        self.lock().listen_for_life();
    }

    /// Adds what to wait for.
    pub fn interests(&self, interests: &mut Vec<Interest>) -> Result<()> {
        self.lock().interests(interests)
    }
}

/// The ends of a pair on one channel, over sockets in the same order on both sides.
///
/// # Errors
/// System if there is no memory for the slots.
pub(super) fn join(
    shape: FifoShape,
    sockets: Vec<Socket>,
    who: &str,
) -> Result<(TcpSend, TcpRecv, SharedPump)> {
    let out = Region::heap(FifoPlaces::bytes(&shape))?;
    let back = Region::heap(FifoPlaces::bytes(&shape))?;
    let (out, back) = (
        FifoPlaces::together(&out, 0),
        FifoPlaces::together(&back, 0),
    );
    // SAFETY: one producer and one consumer each, of regions that nobody else has.
    let (producer, outgoing, incoming, consumer) = unsafe {
        (
            Producer::new(shape, out.clone()),
            Consumer::new(shape, out),
            Producer::new(shape, back.clone()),
            Consumer::new(shape, back),
        )
    };
    let pump = Pump::new(
        who,
        sockets,
        shape.slot_bytes,
        shape.depth,
        outgoing,
        incoming,
    );
    let pump = SharedPump(Arc::new(Mutex::new(pump)));
    let send = TcpSend {
        producer,
        pump: pump.clone(),
    };
    let recv = TcpRecv {
        consumer,
        pump: pump.clone(),
    };
    Ok((send, recv, pump))
}

/// Sends over sockets.
#[derive(Debug)]
pub(super) struct TcpSend {
    producer: Producer,
    pump: SharedPump,
}

impl SendEnd for TcpSend {
    fn ready(&mut self) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.broken()?;
        if pump.is_lent() {
            return Ok(false);
        }
        if self.producer.ready()? {
            return Ok(true);
        }
        pump.send();
        pump.broken()?;
        self.producer.ready()
    }

    fn slot(&mut self) -> &mut [u8] {
        self.producer.slot(0)
    }

    fn written(&self) -> &[u8] {
        self.producer.written()
    }

    fn publish(&mut self, header: Header) {
        self.producer.publish(header);
        self.pump.lock().send();
    }

    fn zero_copy(&mut self) -> Option<&mut dyn SendFrom> {
        Some(self)
    }

    fn flushed(&mut self) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.send();
        if pump.drained()? {
            return Ok(true);
        }
        pump.broken().map(|()| false)
    }
}

impl SendFrom for TcpSend {
    fn send_from(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.send();
        pump.broken()?;
        // It takes the number of a slot, whose payload nobody reads.
        if !self.producer.ready()?
            || !pump.send_from(self.producer.published(), &header, payload)?
        {
            return Ok(false);
        }
        self.producer.publish(header);
        pump.settle()?;
        Ok(true)
    }
}

/// Receives over sockets.
#[derive(Debug)]
pub(super) struct TcpRecv {
    consumer: Consumer,
    pump: SharedPump,
}

impl RecvEnd for TcpRecv {
    fn ready(&mut self) -> Result<bool> {
        if self.consumer.ready()? {
            return Ok(true);
        }
        let mut pump = self.pump.lock();
        pump.receive(false);
        if self.consumer.ready()? {
            return Ok(true);
        }
        if pump.ended() {
            pump.broken()?;
        }
        Ok(false)
    }

    fn header(&self) -> Header {
        self.consumer.header()
    }

    fn payload(&self) -> &[u8] {
        self.consumer.payload()
    }

    fn release(&mut self) {
        self.consumer.release();
    }

    fn zero_copy(&mut self) -> Option<&mut dyn RecvInto> {
        Some(self)
    }
}

impl RecvInto for TcpRecv {
    fn expect(&mut self) -> Result<Option<Header>> {
        if self.consumer.ready()? {
            return Ok(Some(self.consumer.header()));
        }
        self.pump.lock().expect()
    }

    fn recv_into(&mut self, place: &mut [u8]) -> Result<bool> {
        // It may have come before anybody asked for it.
        if self.consumer.ready()? {
            place.copy_from_slice(self.consumer.payload());
            self.consumer.release();
            return Ok(true);
        }
        if !self.pump.lock().recv_into(place)? {
            return Ok(false);
        }
        // It took the number of a slot, whose payload nobody reads.
        let published = self.consumer.ready()?;
        debug_assert!(published, "the pump has published it");
        self.consumer.release();
        Ok(true)
    }
}
