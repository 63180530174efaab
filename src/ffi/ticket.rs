//! Handles that are tickets, not addresses: a tag and a number that is never reused, looked up in
//! a table of the living. Hence NULL, garbage, and handles that were destroyed are errors for as
//! long as the process lives, and nothing that a caller passes is dereferenced. The lookup costs a
//! call some tens of nanoseconds.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The objects of one kind that C programs hold.
#[derive(Debug)]
pub struct Tickets<T> {
    /// The argument's name and what it stands for, for messages.
    name: &'static str,
    kind: &'static str,
    tag: usize,
    live: RwLock<BTreeMap<usize, Arc<T>>>,
    next: AtomicUsize,
}

const NUMBER_BITS: u32 = usize::BITS - 16;

impl<T> Tickets<T> {
    /// None yet. `name` is the argument of C functions that holds a ticket, `kind` what it stands
    /// for; `tag`, the upper 16 bits of every ticket, is such that no pointer of a 64-bit user
    /// process looks like one.
    pub const fn new(name: &'static str, kind: &'static str, tag: u16) -> Tickets<T> {
        Tickets {
            name,
            kind,
            tag: (tag as usize) << NUMBER_BITS,
            live: RwLock::new(BTreeMap::new()),
            next: AtomicUsize::new(1),
        }
    }

    /// Gives `object` a ticket.
    ///
    /// # Errors
    /// Invalid usage if there are no more numbers.
    pub fn register<P>(&self, object: Arc<T>) -> Result<*mut P> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >> NUMBER_BITS != 0 {
            return Err(Error::invalid_usage(format!(
                "{number} {}s were made by this process; there are no more handles",
                self.kind
            )));
        }
        self.live
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number, object);
        Ok(std::ptr::without_provenance_mut(self.tag | number))
    }

    /// What the ticket stands for.
    ///
    /// # Errors
    /// Invalid argument if it stands for nothing, saying whether it once did.
    pub fn lookup<P>(&self, ticket: *const P) -> Result<Arc<T>> {
        let number = self.number_of(ticket)?;
        self.live
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&number)
            .cloned()
            .ok_or_else(|| self.not_alive(ticket, number))
    }

    /// Takes the ticket back.
    ///
    /// # Errors
    /// As [`Tickets::lookup`].
    pub fn remove<P>(&self, ticket: *const P) -> Result<Arc<T>> {
        let number = self.number_of(ticket)?;
        self.live
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&number)
            .ok_or_else(|| self.not_alive(ticket, number))
    }

    fn number_of<P>(&self, ticket: *const P) -> Result<usize> {
        let name = self.name;
        if ticket.is_null() {
            return Err(Error::invalid_argument(format!("{name} is NULL")));
        }
        match ticket.addr() ^ self.tag {
            number if number >> NUMBER_BITS == 0 => Ok(number),
            _ => Err(Error::invalid_argument(format!(
                "{name} {ticket:?} is not a {}",
                self.kind
            ))),
        }
    }

    fn not_alive<P>(&self, ticket: *const P, number: usize) -> Error {
        let why = if (1..self.next.load(Ordering::Relaxed)).contains(&number) {
            "was destroyed".into()
        } else {
            format!("is not a {}", self.kind)
        };
        Error::invalid_argument(format!("{} {ticket:?} {why}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_named_and_not_touched() {
        const TAG: u16 = 0xC1C4;
        static TICKETS: Tickets<u8> = Tickets::new("comm", "communicator", TAG);
        let tag = usize::from(TAG) << NUMBER_BITS;
        let stack = [0u8; 64];
        for (comm, said) in [
            (std::ptr::null(), "comm is NULL"),
            (stack.as_ptr(), "is not a communicator"),
            (std::ptr::without_provenance(1), "is not a communicator"),
            (
                std::ptr::without_provenance(usize::MAX),
                "is not a communicator",
            ),
            (std::ptr::without_provenance(tag), "is not a communicator"),
            (
                std::ptr::without_provenance(tag | (1 << 40)),
                "is not a communicator",
            ),
        ] {
            for error in [
                TICKETS.lookup(comm).unwrap_err(),
                TICKETS.remove(comm).unwrap_err(),
            ] {
                assert!(error.message().contains(said), "{error}");
            }
        }
        let ticket: *mut u8 = TICKETS.register(Arc::new(7)).unwrap();
        assert_eq!(*TICKETS.lookup(ticket).unwrap(), 7);
        assert_eq!(*TICKETS.remove(ticket).unwrap(), 7);
        // A number that was given out and is not in the table belongs to the dead.
        let error = TICKETS.lookup(ticket).unwrap_err();
        assert!(error.message().contains("was destroyed"), "{error}");
    }
}
