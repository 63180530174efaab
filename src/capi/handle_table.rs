//! Handles that are handles, not addresses: a tag and a number that is never reused, looked up in
//! a table of the living. Hence NULL, garbage, and handles that were destroyed are errors for as
//! long as the process lives, and nothing that a caller passes is dereferenced. The lookup costs a
//! call some tens of nanoseconds, and waits for a fork that another thread has under way: a child
//! finds the table whole.

use crate::error::{Error, Result};
use crate::sys::fork_safe::ForkSafe;
use std::sync::Arc;

/// The objects of one kind that C programs hold.
#[derive(Debug)]
pub struct HandleTable<T> {
    /// The argument's name and what it stands for, for messages.
    name: &'static str,
    kind: &'static str,
    tag: usize,
    table: ForkSafe<HandleEntries<T>>,
}

/// Made and freed outside of the guard, as objects are: nothing is allocated in it.
#[derive(Debug)]
struct HandleEntries<T> {
    /// By their numbers, which ascend.
    live: Vec<(usize, Arc<T>)>,
    /// The number of the next one.
    next: usize,
}

const NUMBER_BITS: u32 = usize::BITS - 16;

impl<T> HandleTable<T> {
    /// None yet. `name` is the argument of C functions that holds a handle, `kind` what it stands
    /// for; `tag`, the upper 16 bits of every handle, is such that no pointer of a 64-bit user
    /// process looks like one.
    pub const fn new(name: &'static str, kind: &'static str, tag: u16) -> HandleTable<T> {
        HandleTable {
            name,
            kind,
            tag: (tag as usize) << NUMBER_BITS,
            table: ForkSafe::new(HandleEntries {
                live: Vec::new(),
                next: 1,
            }),
        }
    }

    /// Gives `object` a handle.
    ///
    /// # Errors
    /// Invalid usage if there are no more numbers.
    pub fn register<P>(&self, object: Arc<T>) -> Result<*mut P> {
        let mut object = Some(object);
        let mut room = Vec::new();
        loop {
            let number = self.table.with(|table| table.add(&mut object, &mut room));
            match number {
                Ok(number) if number >> NUMBER_BITS == 0 => {
                    return Ok(std::ptr::without_provenance_mut(self.tag | number));
                }
                Ok(number) => {
                    return Err(Error::invalid_usage(format!(
                        "{number} {}s were made by this process; there are no more handles",
                        self.kind
                    )));
                }
                Err(live) => room = Vec::with_capacity(2 * live + 8),
            }
        }
    }

    /// What the handle stands for.
    ///
    /// # Errors
    /// Invalid argument if it stands for nothing, saying whether it once did.
    pub fn lookup<P>(&self, handle: *const P) -> Result<Arc<T>> {
        let number = self.number_of(handle)?;
        let found = self.table.with(|table| {
            let place = table.place(number)?;
            Some(table.live[place].1.clone())
        });
        found.ok_or_else(|| self.not_alive(handle, number))
    }

    /// Takes the handle back.
    ///
    /// # Errors
    /// As [`HandleTable::lookup`].
    pub fn remove<P>(&self, handle: *const P) -> Result<Arc<T>> {
        let number = self.number_of(handle)?;
        let found = self.table.with(|table| {
            let place = table.place(number)?;
            Some(table.live.remove(place).1)
        });
        found.ok_or_else(|| self.not_alive(handle, number))
    }

    /// Whatever a handle stands for, the oldest first.
    pub fn all(&self) -> Vec<Arc<T>> {
        let mut all = Vec::new();
        loop {
            let lacking = self.table.with(|table| {
                let live = table.live.len();
                if live <= all.capacity() {
                    all.extend(table.live.iter().map(|(_, object)| object.clone()));
                    return None;
                }
                Some(live)
            });
            match lacking {
                None => return all,
                Some(live) => all.reserve(2 * live),
            }
        }
    }

    fn number_of<P>(&self, handle: *const P) -> Result<usize> {
        let name = self.name;
        if handle.is_null() {
            return Err(Error::invalid_argument(format!("{name} is NULL")));
        }
        match handle.addr() ^ self.tag {
            number if number >> NUMBER_BITS == 0 => Ok(number),
            _ => Err(Error::invalid_argument(format!(
                "{name} {handle:?} is not a {}",
                self.kind
            ))),
        }
    }

    fn not_alive<P>(&self, handle: *const P, number: usize) -> Error {
        let next = self.table.with(|table| table.next);
        let why = if (1..next).contains(&number) {
            "was destroyed".into()
        } else {
            format!("is not a {}", self.kind)
        };
        Error::invalid_argument(format!("{} {handle:?} {why}", self.name))
    }
}

impl<T> HandleEntries<T> {
    /// Takes `object` in, and says its number: one that is too large if there are no more. Says how
    /// many there are if they fill their memory and `room`; leaves in `room` what it no longer uses.
    fn add(
        &mut self,
        object: &mut Option<Arc<T>>,
        room: &mut Vec<(usize, Arc<T>)>,
    ) -> std::result::Result<usize, usize> {
        if self.live.len() == self.live.capacity() {
            if room.capacity() <= self.live.len() {
                return Err(self.live.len());
            }
            room.append(&mut self.live);
            std::mem::swap(room, &mut self.live);
        }
        let number = self.next;
        if number >> NUMBER_BITS == 0
            && let Some(object) = object.take()
        {
            self.live.push((number, object));
            self.next += 1;
        }
        Ok(number)
    }

    fn place(&self, number: usize) -> Option<usize> {
        self.live
            .binary_search_by_key(&number, |&(number, _)| number)
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_named_and_not_touched() {
        const TAG: u16 = 0xC1C4;
        static HANDLES: HandleTable<u8> = HandleTable::new("comm", "communicator", TAG);
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
                HANDLES.lookup(comm).unwrap_err(),
                HANDLES.remove(comm).unwrap_err(),
            ] {
                assert!(error.message().contains(said), "{error}");
            }
        }
        let handle: *mut u8 = HANDLES.register(Arc::new(7)).unwrap();
        assert_eq!(*HANDLES.lookup(handle).unwrap(), 7);
        let next: *mut u8 = HANDLES.register(Arc::new(8)).unwrap();
        assert_eq!(HANDLES.all(), [Arc::new(7), Arc::new(8)]);
        assert_eq!(*HANDLES.remove(next).unwrap(), 8);
        assert_eq!(*HANDLES.remove(handle).unwrap(), 7);
        // A number that was given out and is not in the table belongs to the dead.
        let error = HANDLES.lookup(handle).unwrap_err();
        assert!(error.message().contains("was destroyed"), "{error}");
    }
}
