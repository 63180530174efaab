//! All RDMA connections of a rank: what its ends and its waiter share.

use super::connection::Connection;
use super::ports::Port;
use super::status;
use super::verbs::{Channel, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::ibverbs::{IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};
use crate::sys::log::{self, Level};
use crate::sys::socket::Interest;
use crate::types::Subsystem;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long leaving waits for what is on its way, in all.
const FAREWELL: Duration = Duration::from_millis(200);

/// From one look for answers to the next.
const NAP: Duration = Duration::from_micros(50);

/// A port in use, and where its queues announce completions.
#[derive(Debug)]
pub(super) struct Rail {
    pub port: Port,
    pub channel: Arc<Channel>,
}

/// The connections, and the ports that they go through. A lock is free unless a program polls
/// ends from several threads.
#[derive(Debug)]
pub(in super::super) struct Endpoint {
    connections: Vec<Mutex<Connection>>,
    /// The rail of each.
    rails_of: Vec<usize>,
    rails: Vec<Rail>,
}

impl Endpoint {
    pub(super) fn new(connections: Vec<(usize, Connection)>, rails: Vec<Rail>) -> Arc<Endpoint> {
        let (rails_of, connections): (Vec<_>, Vec<_>) = connections.into_iter().unzip();
        Arc::new(Endpoint {
            connections: connections.into_iter().map(Mutex::new).collect(),
            rails_of,
            rails,
        })
    }

    pub(super) fn connection(&self, index: usize) -> MutexGuard<'_, Connection> {
        let connection = &self.connections[index];
        connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Connection>> {
        (0..self.connections.len()).map(|index| self.connection(index))
    }

    /// Does what ends had to leave undone.
    pub fn progress(&self) {
        self.each().for_each(|mut connection| connection.catch_up());
    }

    /// Has every queue announce its next completion. A scan must follow before sleeping.
    pub fn arm(&self) {
        self.each().for_each(|mut connection| connection.arm());
    }

    /// Adds what to wait for.
    pub fn interests(&self, interests: &mut Vec<Interest>) {
        let readable = |fd: RawFd| Interest {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        for rail in &self.rails {
            interests.push(readable(rail.channel.fd()));
            interests.push(readable(rail.port.device.event_fd()));
        }
    }

    /// Takes what was announced.
    pub fn wake(&self) {
        for rail in &self.rails {
            rail.channel.events(|number| {
                if number < self.connections.len() {
                    self.connection(number).disarmed();
                }
            });
            // Rails may share a device: the first of them hears for all.
            while let Some((event, element)) = rail.port.device.event() {
                self.happened(&rail.port.device, event, element);
            }
        }
    }

    /// Something happened to a device. What breaks queue pairs shows in completions.
    fn happened(&self, device: &Arc<Device>, event: u32, element: usize) {
        let name = status::event_name(event);
        let rails = self.rails.iter().enumerate();
        let rails = rails.filter(|(_, rail)| Arc::ptr_eq(&rail.port.device, device));
        let of_ports = matches!(event, IBV_EVENT_PORT_ERR | IBV_EVENT_PORT_ACTIVE);
        let mut concerns_us = false;
        for (index, Rail { port, .. }) in rails {
            let fatal = event == IBV_EVENT_DEVICE_FATAL;
            let of_this_port = of_ports && element == usize::from(port.number);
            if !fatal && !of_this_port {
                continue;
            }
            concerns_us = true;
            log::line_of(Subsystem::Net, Level::Warn, format_args!("{port}: {name}"));
            if fatal {
                self.condemn(index);
            }
        }
        if !concerns_us {
            let device = device.name();
            log::line_of(
                Subsystem::Net,
                Level::Info,
                format_args!("{device}: {name}"),
            );
        }
    }

    /// The device of a rail has failed.
    fn condemn(&self, rail: usize) {
        let port = &self.rails[rail].port;
        let name = status::event_name(IBV_EVENT_DEVICE_FATAL);
        let rails_of = self.rails_of.iter().enumerate();
        for (index, _) in rails_of.filter(|(_, of)| **of == rail) {
            self.connection(index).condemn(Error::new(
                ErrorKind::System,
                format!("{port}: {name}; look at the kernel's log of this host"),
            ));
        }
    }

    /// Finds out whether all peers are reached: queue pairs are connected without a packet, so that of
    /// ports on networks apart the first message would tell. All ranks must have connected theirs; a
    /// peer that had not would miss the question, and get it again a second later.
    ///
    /// # Errors
    /// Why one is not; timeout at `deadline`; the fault's reason.
    pub fn prove(&self, fault: &Fault, deadline: Instant) -> Result<()> {
        self.each().for_each(|mut connection| connection.ask());
        loop {
            let mut silent = None;
            for mut connection in self.each() {
                if !connection.has_answered()? {
                    silent = silent.or_else(|| Some(connection.way_there()));
                }
            }
            let Some(silent) = silent else {
                return Ok(());
            };
            fault.ends_waits()?;
            if Instant::now() >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no answer by RDMA from {silent} in half the time for joining"),
                ));
            }
            std::thread::sleep(NAP);
        }
    }

    /// Finds out which peers still answer.
    pub fn listen_for_life(&self) {
        self.each()
            .for_each(|mut connection| connection.listen_for_life());
    }
}

impl Drop for Endpoint {
    /// Peers that listen hear that this rank leaves in good order, after all that it sent.
    fn drop(&mut self) {
        self.each().for_each(|mut connection| connection.leave());
        let until = Instant::now() + FAREWELL;
        while !self.each().all(|mut connection| connection.gone()) && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
