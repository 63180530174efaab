//! Forked children: a child closes the descriptors that this process shares with its peers.
//!
//! A peer sees the end of a connection only when the last process that holds it has closed it. A
//! worker that is forked after the communicator was made would therefore hide the death of its
//! rank. So a child closes every [`CloseOnFork`] before `fork` returns in it.
//!
//! Objects with a [`ProcessId`] are unusable in a child: the child has none of the threads that
//! serve them. If a child used a GPU or a shared mapping, peers would take its actions for the
//! parent's. Communicators that the child makes itself work.
//!
//! Children of `vfork`, `posix_spawn`, `_Fork` or a bare `clone` run no handlers. Such children
//! execute another program, and all descriptors of this library are closed on exec.

use super::stderr;
use crate::error::{Error, Result};
use std::cell::UnsafeCell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of forks from the first process that loaded this library to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Descriptors that a child closes. `fork` runs under the lock, so no descriptor is opened or
/// closed meanwhile: none escapes the table, and no listed number has been reused.
static TABLE: Table = Table {
    lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
    descriptors: UnsafeCell::new(Vec::new()),
};

struct Table {
    /// A lock of the C library, not of Rust's: the child may unlock its copy.
    lock: UnsafeCell<libc::pthread_mutex_t>,
    descriptors: UnsafeCell<Vec<RawFd>>,
}

// SAFETY: `with` and `close_all` touch the descriptors only under the lock, and a pthread mutex may
// be shared by threads.
unsafe impl Sync for Table {}

impl Table {
    /// Runs `work` under the lock. `work` must neither fork nor make or drop a [`CloseOnFork`].
    fn with<R>(&self, work: impl FnOnce(&mut Vec<RawFd>) -> R) -> R {
        struct Unlock<'a>(&'a Table);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                // SAFETY: `with` has locked the mutex on this thread.
                unsafe { libc::pthread_mutex_unlock(self.0.lock.get()) };
            }
        }
        install();
        // SAFETY: the mutex is initialised and, as part of a static, never moves. A plain mutex has
        // no error to report.
        unsafe { libc::pthread_mutex_lock(self.lock.get()) };
        let _unlock = Unlock(self);
        // SAFETY: the lock makes this the only reference to the descriptors.
        work(unsafe { &mut *self.descriptors.get() })
    }
}

/// Whether the fork handlers are installed.
static HANDLERS: AtLeastOnce = AtLeastOnce(AtomicBool::new(false));

/// Thread that forks and has locked the table for it; 0 for none.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// Nesting depth: calls of `prepare` minus calls of `parent` on the forking thread. A fork calls
/// each handler as often as it was added, and a handler of another library may itself fork. The
/// table stays locked until the outermost fork is over.
static DEPTH: AtomicU64 = AtomicU64::new(0);

/// Whether `child` has closed the descriptors after the current fork.
static CHILD_HAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// An action that runs at least once. Several threads that arrive together each run it. No thread
/// waits for another, because a forked child has only the thread that forked.
struct AtLeastOnce(AtomicBool);

impl AtLeastOnce {
    /// Runs `work` unless a thread has completed it, in this process or in the process from which
    /// it was forked.
    fn ensure(&self, work: impl FnOnce()) {
        // SYNC POINT handlers: pairs with the release store below.
        if !self.0.load(Ordering::Acquire) {
            work();
            // SYNC POINT handlers: publishes the installed handlers to a thread that skips `work`
            // and forks.
            self.0.store(true, Ordering::Release);
        }
    }
}

/// Installs the handlers when the library is loaded, before there is a descriptor to close. If
/// another thread forks while handlers are added, its fork runs none or only some of them. A
/// program that links the library statically without this section installs them at the first use.
// SAFETY: the section `.init_array` holds pointers to functions of this type.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    install();
    #[cfg(test)]
    tests::LOADED.store(true, Ordering::Relaxed);
}

fn install() {
    HANDLERS.ensure(add_handlers);
}

/// Adds the handlers, perhaps a second time: several threads may call this together, and a child
/// may not know that its parent added them. If they were added twice, the first run of each handler
/// does the work. In one fork, the C library runs either all three handlers of one addition or
/// none.
fn add_handlers() {
    // SAFETY: the handlers live as long as the library, and make only calls that are legal in a
    // child of a process with threads.
    let code = unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    if code != 0 {
        let warning = stderr::log_line(
            "warn",
            format_args!(
                "forked children of this program will keep its connections open, so that other \
                 ranks notice its end only after the end of those children: pthread_atfork failed \
                 with {code}"
            ),
        );
        stderr::write(&warning);
    }
}

/// Returns the number of this thread; the copy of a thread in a child has the same number.
fn this_thread() -> u64 {
    // SAFETY: `pthread_self` has no preconditions.
    unsafe { libc::pthread_self() }
}

/// Returns whether this thread has locked the table for a fork. A relaxed load is enough, because
/// only this thread stores its own number.
fn is_forking() -> bool {
    FORKING.load(Ordering::Relaxed) == this_thread()
}

extern "C" fn prepare() {
    if !is_forking() {
        // SAFETY: the mutex is initialised and, as part of a static, never moves.
        unsafe { libc::pthread_mutex_lock(TABLE.lock.get()) };
        FORKING.store(this_thread(), Ordering::Relaxed);
    }
    DEPTH.fetch_add(1, Ordering::Relaxed);
    CHILD_HAS_CLOSED.store(false, Ordering::Relaxed);
}

extern "C" fn parent() {
    if is_forking() && DEPTH.fetch_sub(1, Ordering::Relaxed) == 1 {
        FORKING.store(0, Ordering::Relaxed);
        // SAFETY: the first `prepare` of this fork locked the mutex on this thread, and this is the
        // last handler of the fork.
        unsafe { libc::pthread_mutex_unlock(TABLE.lock.get()) };
    }
}

extern "C" fn child() {
    if is_forking() && !CHILD_HAS_CLOSED.swap(true, Ordering::Relaxed) {
        close_all();
    }
    parent();
}

/// Closes all descriptors of the table, in a child.
fn close_all() {
    // SAFETY: this thread is the copy of the thread that has held the lock since `prepare`, so the
    // table is consistent and its numbers are valid. `close` and `clear` neither allocate nor wait.
    unsafe {
        let descriptors = &mut *TABLE.descriptors.get();
        for &descriptor in descriptors.iter() {
            libc::close(descriptor);
        }
        descriptors.clear();
    }
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Runs `work` while no other thread forks. `work` must neither fork, nor call this function, nor
/// make or drop a [`CloseOnFork`].
pub(super) fn without_fork<R>(work: impl FnOnce() -> R) -> R {
    TABLE.with(|_| work())
}

/// Identity of the process that made an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId(u64);

impl ProcessId {
    /// Returns this process.
    pub fn this() -> ProcessId {
        install();
        ProcessId(FORKS.load(Ordering::Relaxed))
    }

    /// Returns whether the current process made the object, rather than a process from which it was
    /// forked. Costs one relaxed load.
    #[inline]
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails if the current process is a forked child of the process that made the object.
    ///
    /// # Errors
    /// Invalid usage in a child that was forked after the object was made.
    #[inline]
    pub fn check(self) -> Result<()> {
        match self.is_this() {
            true => Ok(()),
            false => Err(Error::invalid_usage(
                "this process was forked after the communicator was made, and has no part in it; \
                 it can make communicators of its own",
            )),
        }
    }
}

/// A value that is dropped only in the process that made it; a forked child leaks it.
pub struct ForkOwned<T> {
    owner: ProcessId,
    value: ManuallyDrop<T>,
}

impl<T> ForkOwned<T> {
    /// Makes a value that belongs to this process.
    pub fn new(value: T) -> ForkOwned<T> {
        ForkOwned {
            owner: ProcessId::this(),
            value: ManuallyDrop::new(value),
        }
    }
}

impl<T> Deref for ForkOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ForkOwned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for ForkOwned<T> {
    fn drop(&mut self) {
        if self.owner.is_this() {
            // SAFETY: `drop` runs once, and no code uses `self` after it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for ForkOwned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A descriptor that is closed in forked children. In a child its number is invalid or belongs to
/// another file, so owners check their [`ProcessId`] before they use it.
pub struct CloseOnFork<T: AsRawFd> {
    owner: ProcessId,
    value: ManuallyDrop<T>,
}

impl<T: AsRawFd> CloseOnFork<T> {
    /// Opens the descriptor by `open`, which makes only system calls that do not wait. No thread
    /// forks meanwhile.
    ///
    /// # Errors
    /// The errors of `open`.
    pub fn open<E>(
        open: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<CloseOnFork<T>, E> {
        TABLE.with(|descriptors| {
            let opened = open()?;
            Ok(CloseOnFork::listed(opened, descriptors))
        })
    }

    /// Adds the descriptor to the table under the lock, so that no fork falls between opening and
    /// listing it.
    fn listed(opened: T, descriptors: &mut Vec<RawFd>) -> CloseOnFork<T> {
        descriptors.push(opened.as_raw_fd());
        CloseOnFork {
            owner: ProcessId::this(),
            value: ManuallyDrop::new(opened),
        }
    }
}

/// A child that is forked after the descriptor was opened and before this conversion keeps the
/// descriptor open.
impl<T: AsRawFd> From<T> for CloseOnFork<T> {
    fn from(opened: T) -> CloseOnFork<T> {
        TABLE.with(|descriptors| CloseOnFork::listed(opened, descriptors))
    }
}

impl<T: AsRawFd> Drop for CloseOnFork<T> {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            // `close_all` has closed the descriptor, and another file may have its number by now.
            return;
        }
        TABLE.with(|descriptors| {
            let number = self.value.as_raw_fd();
            if let Some(place) = descriptors.iter().position(|&other| other == number) {
                descriptors.swap_remove(place);
            }
            // SAFETY: `drop` runs once, and no code uses `self` after it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        });
    }
}

impl<T: AsRawFd> Deref for CloseOnFork<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: AsRawFd> DerefMut for CloseOnFork<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: AsRawFd + AsFd> AsFd for CloseOnFork<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.value.as_fd()
    }
}

impl<T: AsRawFd + fmt::Debug> fmt::Debug for CloseOnFork<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::os::fd::OwnedFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    /// Whether the dynamic loader has run `at_load`.
    pub(super) static LOADED: AtomicBool = AtomicBool::new(false);

    #[test]
    fn handlers_are_installed_at_load() {
        assert!(LOADED.load(Ordering::Relaxed));
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn is_open(descriptor: RawFd) -> bool {
        // SAFETY: `fcntl` accepts any number as a descriptor, and F_GETFD changes nothing.
        unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
    }

    /// Runs `body` in a forked child. Returns whether `body` returned true.
    pub(crate) fn in_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs only `body` and ends by `_exit`, or by SIGALRM if it hangs.
        unsafe {
            match libc::fork() {
                0 => {
                    libc::alarm(20);
                    let said = catch_unwind(AssertUnwindSafe(body));
                    libc::_exit(i32::from(!matches!(said, Ok(true))))
                }
                child => {
                    assert!(child > 0);
                    let mut status = -1;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    status == 0
                }
            }
        }
    }

    /// Sets the limit of open descriptors of this process, and returns the previous limit. The
    /// caller is a forked child, or restores the limit.
    pub(crate) fn limit_descriptors(to: u64) -> u64 {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: both calls access only `limit`.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, to);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
            before
        }
    }

    /// Returns the CPU time that `work` costs this process.
    pub(crate) fn processor_time(work: impl FnOnce()) -> Duration {
        let now = || {
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: `clock_gettime` writes only `time`.
            let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
            assert_eq!(code, 0);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        let begin = now();
        work();
        now() - begin
    }

    #[test]
    fn child_closes_listed_descriptors_only() {
        let (plain, kept) = (null(), CloseOnFork::open(|| Ok::<_, ()>(null())).unwrap());
        drop(CloseOnFork::from(null()));
        // This descriptor very likely reuses the number of the descriptor that was closed last.
        let again = null();
        let numbers = [&plain, &*kept, &again].map(|one| one.as_raw_fd());
        assert!(in_child(|| numbers.map(is_open) == [true, false, true]));
        assert_eq!(numbers.map(is_open), [true; 3]);
    }

    #[test]
    fn child_does_not_drop_values_of_its_parent() {
        struct DropInParent(u32);
        impl Drop for DropInParent {
            fn drop(&mut self) {
                assert_eq!(self.0, std::process::id(), "dropped in a child");
            }
        }
        let kept = CloseOnFork::from(null());
        let owner = ProcessId::this();
        let ours = ForkOwned::new(DropInParent(std::process::id()));
        assert!(in_child(move || {
            let number = kept.as_raw_fd();
            let other = ManuallyDrop::new(null());
            // SAFETY: `number` is free, or the descriptor of `other`.
            unsafe { libc::dup2(other.as_raw_fd(), number) };
            drop(kept);
            drop(ours);
            // The unrelated descriptor that reuses the number stays open.
            is_open(number) && owner.check().is_err() && ProcessId::this().is_this()
        }));
        assert!(owner.check().is_ok());
    }

    #[test]
    fn descriptor_opened_in_a_child_stays_open() {
        assert!(in_child(|| {
            let own = CloseOnFork::from(null());
            let number = own.as_raw_fd();
            let closed = in_child(|| !is_open(number));
            let stays = is_open(number);
            drop(own);
            closed && stays && !is_open(number)
        }));
    }

    /// The child does not wait for the thread that was installing handlers when it was forked.
    #[test]
    fn child_forked_during_installation_installs_handlers() {
        let handlers = AtLeastOnce(AtomicBool::new(false));
        let (begun, forked) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            while !flag.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                handlers.ensure(|| {
                    begun.store(true, Ordering::Relaxed);
                    wait_for(&forked);
                });
            });
            wait_for(&begun);
            let installed = in_child(|| {
                let mut times = 0;
                handlers.ensure(|| times += 1);
                handlers.ensure(|| times += 1);
                times == 1
            });
            forked.store(true, Ordering::Relaxed);
            assert!(installed);
        });
        handlers.ensure(|| panic!("installed again"));
    }

    #[test]
    fn handlers_added_several_times_run_once() {
        assert!(in_child(|| {
            add_handlers();
            add_handlers();
            let own = CloseOnFork::from(null());
            let number = own.as_raw_fd();
            let before = FORKS.load(Ordering::Relaxed);
            let closed = in_child(|| {
                let closed = !is_open(number);
                // Checks that the table is unlocked.
                drop(CloseOnFork::from(null()));
                closed && FORKS.load(Ordering::Relaxed) == before + 1
            });
            let stays = is_open(number);
            drop(own);
            closed && stays && !is_open(number)
        }));
    }

    /// Calls the handlers as the C library does when another library's `prepare` handler forks.
    #[test]
    fn child_of_nested_forks_closes_listed_descriptors() {
        assert!(in_child(|| {
            let shared = CloseOnFork::from(null());
            let number = shared.as_raw_fd();
            let before = FORKS.load(Ordering::Relaxed);
            prepare();
            {
                prepare();
                parent();
            }
            child();
            let closed = !is_open(number);
            // Checks that the table is unlocked.
            drop(CloseOnFork::from(null()));
            closed && FORKS.load(Ordering::Relaxed) == before + 1
        }));
    }

    /// A fork never falls between the system call that opens a descriptor and its entry in the
    /// table.
    #[test]
    fn child_forked_during_open_or_drop_inherits_no_descriptor() {
        let done = AtomicBool::new(false);
        let open = || memfd_create(c"unshared", MFdFlags::empty());
        let count = || {
            let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let links = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            links
                .filter(|link| link.to_string_lossy().contains("memfd:unshared"))
                .count()
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        drop(CloseOnFork::open(open).unwrap());
                    }
                });
            }
            let clean = (0..200).filter(|_| in_child(|| count() == 0)).count();
            done.store(true, Ordering::Relaxed);
            assert_eq!(clean, 200);
        });
        let open = open().unwrap();
        assert_eq!(count(), 1, "the count counts {open:?}");
    }
}
