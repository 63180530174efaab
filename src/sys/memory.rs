//! Mapped memory, private or shared by descriptor.

use crate::error::{Error, ErrorKind, Result};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes of a page; mappings are multiples of it.
pub const PAGE: usize = 4096;

/// Mapped memory, zero until written; pages cost memory only once they are touched.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory that belongs to no thread; who may touch what in it when is the
// business of those who take pointers into it.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only return the address and the size.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of this process alone.
    ///
    /// # Errors
    /// System, with the size, if there is not that much address space.
    pub fn private(len: usize) -> Result<Mapping> {
        let size = pages(len)?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let base = unsafe {
            nix::sys::mman::mmap_anonymous(
                None,
                size,
                nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE,
                nix::sys::mman::MapFlags::MAP_PRIVATE | nix::sys::mman::MapFlags::MAP_NORESERVE,
            )
        }
        .map_err(|error| Error::system(format!("mapping {size} bytes"), error))?;
        Ok(Mapping {
            base: base.cast(),
            len: size.get(),
        })
    }

    /// The memory of a descriptor that [`sealed_memfd`] made, here or in another process.
    ///
    /// # Errors
    /// Mismatch, with the numbers, if its size is not the one that `len` needs, or if it can
    /// still shrink: touching memory beyond its end would kill this process. System if it cannot
    /// be mapped.
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
        // After the seals: from here on the size is final.
        let found = nix::sys::stat::fstat(memory)
            .map_err(|error| Error::system("reading the size of shared memory", error))?
            .st_size;
        if usize::try_from(found) != Ok(size.get()) {
            return Err(Error::new(
                crate::error::ErrorKind::Mismatch,
                format!("shared memory of a peer has {found} bytes, expected {size}"),
            ));
        }
        // SAFETY: as in `private`.
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

    /// Its first byte, page aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its size in bytes, a multiple of [`PAGE`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes; it always has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and whoever holds a pointer into it holds it too.
        let _ = unsafe { nix::sys::mman::munmap(self.base.cast(), self.len) };
    }
}

/// Shared memory without a name, closed on exec, of `len` bytes rounded up to pages. Its size can
/// never change again, so nobody who holds it can make another's access fail.
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
    // Beyond the limit sizing it would raise a signal that ends the process.
    check_file_size(size.get() as u64, file_size_limit())
        .map_err(|error| error.context(what("sizing")))?;
    nix::unistd::ftruncate(&memory, bytes).map_err(|error| Error::system(what("sizing"), error))?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&memory, FcntlArg::F_ADD_SEALS(seals))
        .map_err(|error| Error::system(what("sealing"), error))?;
    Ok(memory)
}

/// How large a file of this process may become, shared memory included.
fn file_size_limit() -> u64 {
    // SAFETY: `limit` is plain data, valid as zero, that lives through the call.
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
    fn shared_memory_is_shared_and_cannot_shrink() {
        let memory = sealed_memfd(5000).unwrap();
        let one = Mapping::shared(&memory, 5000).unwrap();
        let two = Mapping::shared(&memory, 5000).unwrap();
        assert_eq!(one.len(), 8192);
        // SAFETY: within both mappings, which nothing else uses.
        unsafe {
            one.base().add(8191).write(7);
            assert_eq!(two.base().add(8191).read(), 7);
        }
        assert!(nix::unistd::ftruncate(&memory, 4096).is_err());
        assert!(nix::unistd::ftruncate(&memory, 1 << 20).is_err());
    }

    #[test]
    fn memory_that_could_kill_us_is_refused() {
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

    /// The limit is the process's, and so is the signal.
    #[test]
    fn shared_memory_beyond_the_limit_of_files_is_an_error() {
        let refused = in_child(|| {
            let limit = libc::rlimit {
                rlim_cur: 8192,
                rlim_max: 8192,
            };
            // SAFETY: reads this one structure.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
            let error = sealed_memfd(8193).unwrap_err();
            let says = |part| error.message().contains(part);
            set == 0 && says("8192 bytes") && says("12288") && sealed_memfd(8192).is_ok()
        });
        assert!(refused);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Mapping::private(usize::MAX).is_err());
        assert!(Mapping::private(1 << 60).is_err());
        assert!(sealed_memfd(usize::MAX).is_err());
    }
}
