//! Mapped memory, private to this process or shared by a descriptor.

use crate::error::{Error, ErrorKind, Result};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes of a page; the size of every mapping is a multiple.
pub const PAGE: usize = 4096;

/// Mapped memory, zero until written. A page takes memory from its first access.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to no thread. Code that takes pointers into it arranges the accesses.
unsafe impl Send for Mapping {}
// SAFETY: the methods only return address and size.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps memory of this process alone.
    ///
    /// # Errors
    /// System, with the size, if the address space is too small.
    pub fn private(len: usize) -> Result<Mapping> {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
        let size = pages(len)?;
        let flags = match cfg!(miri) {
            // Miri knows no other flags.
            true => MapFlags::MAP_PRIVATE,
            false => MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
        };
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address of a new mapping, which overlaps no other.
        let base = unsafe { mmap_anonymous(None, size, access, flags) }
            .map_err(|error| Error::system(format!("mapping {size} bytes"), error))?;
        Ok(Mapping {
            base: base.cast(),
            len: size.get(),
        })
    }

    /// Maps the memory of a descriptor that [`sealed_memfd`] made, in this or another process.
    ///
    /// # Errors
    /// Mismatch, with the numbers, if the memory has another size than `len` rounded up to pages.
    /// Mismatch also if it can still shrink, because an access beyond its end would kill this
    /// process. System if it cannot be mapped.
    pub fn shared(memory: &OwnedFd, len: usize) -> Result<Mapping> {
        let size = pages(len)?;
        let seals = fcntl(memory, FcntlArg::F_GET_SEALS)
            .map_err(|error| Error::system("reading the seals of shared memory", error))?;
        let needed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        if !SealFlag::from_bits_retain(seals).contains(needed) {
            return Err(Error::new(
                crate::error::ErrorKind::Mismatch,
                format!("shared memory of a peer has seals {seals:#x}, without shrink and grow"),
            ));
        }
        // Reads the size after the seals, which make it final.
        let found = nix::sys::stat::fstat(memory)
            .map_err(|error| Error::system("reading the size of shared memory", error))?
            .st_size;
        if usize::try_from(found) != Ok(size.get()) {
            return Err(Error::new(
                crate::error::ErrorKind::Mismatch,
                format!("shared memory of a peer has {found} bytes, expected {size}"),
            ));
        }
        // SAFETY: the kernel chooses the address of a new mapping, which overlaps no other.
        let base = unsafe {
            nix::sys::mman::mmap(
                None,
                size,
                nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE,
                nix::sys::mman::MapFlags::MAP_SHARED,
                memory.as_fd(),
                0,
            )
        }
        .map_err(|error| Error::system(format!("mapping {size} shared bytes"), error))?;
        Ok(Mapping {
            base: base.cast(),
            len: size.get(),
        })
    }

    /// Returns the address of the first byte, page aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the size in bytes, a multiple of [`PAGE`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the mapping has no bytes, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping. Holders of pointers into it also hold this value.
        let _ = unsafe { nix::sys::mman::munmap(self.base.cast(), self.len) };
    }
}

/// Makes shared memory without a name, closed on exec, of `len` bytes rounded up to pages. The
/// seals fix its size: no holder can shrink it and make another process fail at an access.
///
/// # Errors
/// System, with the size.
pub fn sealed_memfd(len: usize) -> Result<OwnedFd> {
    let size = pages(len)?;
    let what = |step: &str| format!("{step} {size} bytes of shared memory");
    let memory = memfd_create(
        c"cinch",
        MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
    )
    .map_err(|error| Error::system(what("creating"), error))?;
    let bytes = libc::off_t::try_from(size.get())
        .map_err(|_| Error::invalid_argument(what("cannot share")))?;
    // Without this check `ftruncate` beyond the limit raises SIGXFSZ, which ends the process.
    check_file_size(size.get() as u64, file_size_limit())
        .map_err(|error| error.context(what("sizing")))?;
    nix::unistd::ftruncate(&memory, bytes).map_err(|error| Error::system(what("sizing"), error))?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&memory, FcntlArg::F_ADD_SEALS(seals))
        .map_err(|error| Error::system(what("sealing"), error))?;
    Ok(memory)
}

/// Returns the largest file size in bytes that this process may write. The limit applies to shared
/// memory as it does to files.
fn file_size_limit() -> u64 {
    // SAFETY: `limit` is plain data, valid as zero, and outlives the call.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) {
            0 => limit.rlim_cur,
            _ => u64::MAX,
        }
    }
}

fn check_file_size(size: u64, limit: u64) -> Result<()> {
    if size <= limit {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::System,
        format!(
            "files of this process may have {limit} bytes, and {size} are needed: raise `ulimit -f`, \
             or lower CINCH_SLOT_BYTES, CINCH_SLOTS or CINCH_CHANNELS"
        ),
    ))
}

fn pages(len: usize) -> Result<NonZeroUsize> {
    len.max(1)
        .checked_next_multiple_of(PAGE)
        .filter(|&size| size <= isize::MAX as usize)
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| Error::invalid_argument(format!("cannot map {len} bytes")))
}

#[cfg(test)]
mod tests {
    use super::super::fork::tests::in_child;
    use super::*;

    #[test]
    fn memfd_mapped_twice_shares_bytes_and_keeps_its_size() {
        let memory = sealed_memfd(5000).unwrap();
        let one = Mapping::shared(&memory, 5000).unwrap();
        let two = Mapping::shared(&memory, 5000).unwrap();
        assert_eq!(one.len(), 8192);
        // SAFETY: the byte lies within both mappings, which no other code uses.
        unsafe {
            one.base().add(8191).write(7);
            assert_eq!(two.base().add(8191).read(), 7);
        }
        assert!(nix::unistd::ftruncate(&memory, 4096).is_err());
        assert!(nix::unistd::ftruncate(&memory, 1 << 20).is_err());
    }

    #[test]
    fn memory_that_can_shrink_or_is_short_is_refused() {
        let short = sealed_memfd(4096).unwrap();
        let error = Mapping::shared(&short, 4097).unwrap_err();
        assert!(error.message().contains("4096") && error.message().contains("8192"));
        let open = memfd_create(c"open", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&open, 4096).unwrap();
        let error = Mapping::shared(&open, 4096).unwrap_err();
        assert!(error.message().contains("without shrink"), "{error}");
        let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
        assert!(Mapping::shared(&file, 4096).is_err());
    }

    /// Runs in a forked child, because the limit and the signal affect the whole process.
    #[test]
    fn memfd_beyond_the_file_size_limit_is_an_error() {
        let refused = in_child(|| {
            let limit = libc::rlimit {
                rlim_cur: 8192,
                rlim_max: 8192,
            };
            // SAFETY: `setrlimit` reads only `limit`.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
            let error = sealed_memfd(8193).unwrap_err();
            let states = |part| error.message().contains(part);
            set == 0 && states("8192 bytes") && states("12288") && sealed_memfd(8192).is_ok()
        });
        assert!(refused);
    }

    #[test]
    fn mapping_of_an_impossible_size_is_an_error() {
        assert!(Mapping::private(usize::MAX).is_err());
        assert!(Mapping::private(1 << 60).is_err());
        assert!(sealed_memfd(usize::MAX).is_err());
    }
}
