//! Table of the handles that C programs hold.
//!
//! A handle is a tag and a number that is never reused; it is no address and is never dereferenced.
//! Hence NULL, garbage and destroyed handles are errors for as long as the process runs. A lookup
//! costs tens of nanoseconds. It waits while another thread forks, so that a forked child finds the
//! table consistent.

use crate::error::{Error, Result};
use crate::sys::fork_safe::ForkSafe;
use std::sync::Arc;

/// The objects of one kind that C programs hold.
#[derive(Debug)]
pub struct HandleTable<T> {
    /// Name of the C argument that holds a handle, for error sentences.
    name: &'static str,
    /// Noun for the objects (such as "communicator"), for error sentences.
    kind: &'static str,
    tag: usize,
    table: ForkSafe<HandleEntries<T>>,
}

/// Contents of a table. [`ForkSafe::with`] must not allocate, so callers allocate and free the
/// memory outside of it.
#[derive(Debug)]
struct HandleEntries<T> {
    /// Registered objects with their numbers, in ascending order.
    live: Vec<(usize, Arc<T>)>,
    /// Number that the next handle gets.
    next: usize,
}

const NUMBER_BITS: u32 = usize::BITS - 16;

impl<T> HandleTable<T> {
    /// Creates an empty table. `name` is the C argument that holds a handle and `kind` the object's
    /// noun, both for error sentences. `tag` fills the upper 16 bits of every handle; no pointer of a
    /// 64-bit user process may have these bits.
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

    /// Returns a new handle for `object`.
    ///
    /// # Errors
    /// Invalid usage if all numbers are used.
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

    /// Returns the object of `handle`.
    ///
    /// # Errors
    /// Invalid argument if `handle` is unknown; the sentence states whether it was destroyed.
    pub fn lookup<P>(&self, handle: *const P) -> Result<Arc<T>> {
        let number = self.number_of(handle)?;
        let found = self.table.with(|table| {
            let index = table.index(number)?;
            Some(table.live[index].1.clone())
        });
        found.ok_or_else(|| self.unknown(handle, number))
    }

    /// Removes `handle` and returns its object.
    ///
    /// # Errors
    /// See [`HandleTable::lookup`].
    pub fn remove<P>(&self, handle: *const P) -> Result<Arc<T>> {
        let number = self.number_of(handle)?;
        let found = self.table.with(|table| {
            let index = table.index(number)?;
            Some(table.live.remove(index).1)
        });
        found.ok_or_else(|| self.unknown(handle, number))
    }

    /// Returns all registered objects, the oldest first.
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
        let number = handle.addr() ^ self.tag;
        if number >> NUMBER_BITS != 0 {
            return Err(Error::invalid_argument(format!(
                "{name} {handle:?} is not a {}",
                self.kind
            )));
        }
        Ok(number)
    }

    fn unknown<P>(&self, handle: *const P, number: usize) -> Error {
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
    /// Adds `object` and returns its number, which exceeds `NUMBER_BITS` if all numbers are used.
    ///
    /// Returns the number of objects as an error if neither the table nor `room` has space for one
    /// more. Leaves memory that the table no longer uses in `room`, for the caller to free.
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

    fn index(&self, number: usize) -> Option<usize> {
        self.live
            .binary_search_by_key(&number, |&(number, _)| number)
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_of_garbage_names_argument() {
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
        // A number that is below the next number and not in the table belonged to a destroyed
        // handle.
        let error = HANDLES.lookup(handle).unwrap_err();
        assert!(error.message().contains("was destroyed"), "{error}");
    }
}
