//! Children that a program forks: what this process shares with others is not theirs.
//!
//! For the other side a connection ends when the last process that holds it is gone. A worker
//! forked after the communicator was made would keep a killed rank alive to its peers: so a child
//! closes such descriptors before `fork` returns in it ([`CloseOnFork`]), and what was made before
//! is dead in it ([`ProcessId`]): it has none of the threads behind it, and a device or a shared
//! mapping would take its goodbye for the parent's. Whatever it makes by itself is its own.
//!
//! Nothing of this runs in children of `vfork`, `posix_spawn`, `_Fork` or a bare `clone`. They
//! are there to become another program, which gets no descriptor of ours: all close on exec.

use super::log::{self, Level};
use crate::error::{Error, Result};
use std::cell::UnsafeCell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Forks between the first process with this library and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The descriptors that a child closes. Held across `fork`: none is then between the kernel and
/// the table, so that none escapes, and no number stands for what it meant before.
static TABLE: Table = Table {
    lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
    descriptors: UnsafeCell::new(Vec::new()),
};

struct Table {
    /// Not the standard library's: the child's copy is unlocked by the child.
    lock: UnsafeCell<libc::pthread_mutex_t>,
    descriptors: UnsafeCell<Vec<RawFd>>,
}

// SAFETY: the descriptors are touched only under the lock, and a mutex may be used by all.
unsafe impl Sync for Table {}

impl Table {
    /// Runs `work`, which makes no [`CloseOnFork`], drops none and does not fork, while no other
    /// thread does.
    fn with<R>(&self, work: impl FnOnce(&mut Vec<RawFd>) -> R) -> R {
        struct Unlock<'a>(&'a Table);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                // SAFETY: locked below, by this thread.
                unsafe { libc::pthread_mutex_unlock(self.0.lock.get()) };
            }
        }
        install();
        // SAFETY: initialised, and never moved: a static. A plain mutex has no error to report.
        unsafe { libc::pthread_mutex_lock(self.lock.get()) };
        let _unlock = Unlock(self);
        // SAFETY: under the lock, and the only reference: see above.
        work(unsafe { &mut *self.descriptors.get() })
    }
}

/// Whether the handlers below are there.
static HANDLERS: AtLeastOnce = AtLeastOnce(AtomicBool::new(false));

/// The thread that forks and has locked the table for it; 0: none.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// Handlers of that thread that have run before a fork, less those after it. Beside additions that
/// are there several times, a handler of another library may fork itself: the table stays locked
/// until the fork around it is over too.
static DEPTH: AtomicU64 = AtomicU64::new(0);

/// Whether the first of a child's handlers has done their work.
static FORGOTTEN: AtomicBool = AtomicBool::new(false);

/// What is done once, or by several threads that come first together. None waits for another: a
/// child of a fork has only the thread that forked.
struct AtLeastOnce(AtomicBool);

impl AtLeastOnce {
    /// Runs `work`, unless some thread has run it to its end, here or before a fork.
    fn ensure(&self, work: impl FnOnce()) {
        // SYNC POINT handlers: pairs with the release below.
        if !self.0.load(Ordering::Acquire) {
            work();
            // SYNC POINT handlers: whoever sees this and forks runs them.
            self.0.store(true, Ordering::Release);
        }
    }
}

/// Where the library is loaded, before it has anything to close: a fork that is under way in another
/// thread when handlers are added runs none of them, or, where it waits in somebody else's, some.
/// What loads no such function adds them at the first use.
// SAFETY: a pointer to a function, which is what the section holds.
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

/// They may be there several times, of threads that came first together or a child that did not
/// know of them: then the first of each kind does the work. The C library runs all three of one
/// addition for a fork, or none.
fn add_handlers() {
    // SAFETY: the handlers live as long as the library, and keep to what a child of a process
    // with threads may do.
    let code = unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    if code != 0 {
        log::line(
            Level::Warn,
            format_args!(
                "children that this program forks will hold its connections, and other ranks \
                 notice its end after theirs only: pthread_atfork failed with {code}"
            ),
        );
    }
}

/// The same in a child as in the thread that it is a copy of.
fn this_thread() -> u64 {
    // SAFETY: asks for a number.
    unsafe { libc::pthread_self() }
}

/// Whether this thread holds the table for a fork. Relaxed: nobody but itself says so.
fn is_forking() -> bool {
    FORKING.load(Ordering::Relaxed) == this_thread()
}

extern "C" fn prepare() {
    if !is_forking() {
        // SAFETY: a mutex in a static.
        unsafe { libc::pthread_mutex_lock(TABLE.lock.get()) };
        FORKING.store(this_thread(), Ordering::Relaxed);
    }
    DEPTH.fetch_add(1, Ordering::Relaxed);
    FORGOTTEN.store(false, Ordering::Relaxed);
}

extern "C" fn parent() {
    if is_forking() && DEPTH.fetch_sub(1, Ordering::Relaxed) == 1 {
        FORKING.store(0, Ordering::Relaxed);
        // SAFETY: the first `prepare` locked it on this thread, and this is the last of what follows.
        unsafe { libc::pthread_mutex_unlock(TABLE.lock.get()) };
    }
}

extern "C" fn child() {
    if is_forking() && !FORGOTTEN.swap(true, Ordering::Relaxed) {
        forget();
    }
    parent();
}

/// Closes what is not this child's.
fn forget() {
    // SAFETY: the lock is held since `prepare`, by the thread that this one is a copy of, so the
    // table is whole; the numbers mean what they meant there. Closing and forgetting numbers
    // allocates nothing and waits for nobody.
    unsafe {
        let descriptors = &mut *TABLE.descriptors.get();
        for &descriptor in descriptors.iter() {
            libc::close(descriptor);
        }
        descriptors.clear();
    }
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Runs `work`, which makes no [`CloseOnFork`], drops none, does not fork and comes here no second time,
/// while no other thread does any of that.
pub(super) fn undisturbed<R>(work: impl FnOnce() -> R) -> R {
    TABLE.with(|_| work())
}

/// The process that something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId(u64);

impl ProcessId {
    /// This process.
    pub fn this() -> ProcessId {
        install();
        ProcessId(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is this process, not one that this was forked from. One relaxed load.
    #[inline]
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// # Errors
    /// Invalid usage if it is a process that this one was forked from.
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

/// What only the process that made it drops: to a forked child it is lost.
pub struct ForkOwned<T> {
    owner: ProcessId,
    value: ManuallyDrop<T>,
}

impl<T> ForkOwned<T> {
    /// Of this process.
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
            // SAFETY: nobody can use `self` after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for ForkOwned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A descriptor that children do not keep. In a child the number means nothing, or something
/// else: whoever has one asks its [`ProcessId`] first.
pub struct CloseOnFork<T: AsRawFd> {
    owner: ProcessId,
    value: ManuallyDrop<T>,
}

impl<T: AsRawFd> CloseOnFork<T> {
    /// Opens it by `open`, a system call or a few that do not wait, during which nobody forks.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn open<E>(
        open: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<CloseOnFork<T>, E> {
        TABLE.with(|descriptors| {
            let opened = open()?;
            Ok(CloseOnFork::listed(opened, descriptors))
        })
    }

    /// Under the lock, so that owner and table are of one process.
    fn listed(opened: T, descriptors: &mut Vec<RawFd>) -> CloseOnFork<T> {
        descriptors.push(opened.as_raw_fd());
        CloseOnFork {
            owner: ProcessId::this(),
            value: ManuallyDrop::new(opened),
        }
    }
}

/// A child of a fork between its opening and this keeps it.
impl<T: AsRawFd> From<T> for CloseOnFork<T> {
    fn from(opened: T) -> CloseOnFork<T> {
        TABLE.with(|descriptors| CloseOnFork::listed(opened, descriptors))
    }
}

impl<T: AsRawFd> Drop for CloseOnFork<T> {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            // Closed by `child`; its number may be somebody's by now.
            return;
        }
        TABLE.with(|descriptors| {
            let number = self.value.as_raw_fd();
            if let Some(place) = descriptors.iter().position(|&other| other == number) {
                descriptors.swap_remove(place);
            }
            // SAFETY: nobody can use `self` after this.
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

    /// Whether the function that is run at load has been.
    pub(super) static LOADED: AtomicBool = AtomicBool::new(false);

    #[test]
    fn handlers_are_there_before_anything_is_used() {
        assert!(LOADED.load(Ordering::Relaxed));
    }

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn is_open(descriptor: RawFd) -> bool {
        // SAFETY: asks about a number.
        unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
    }

    /// Runs `body` in a child; whether it said yes.
    pub(crate) fn in_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `body` only, and leaves by `_exit`, or by the kernel if it hangs.
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

    /// How many descriptors this process may have, from now on; it was as many as is returned. To be undone,
    /// or for children.
    pub(crate) fn limit_descriptors(to: u64) -> u64 {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: both read and write this one structure.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, to);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
            before
        }
    }

    /// What `work` costs this process of its processors' time.
    pub(crate) fn processor_time(work: impl FnOnce()) -> Duration {
        let now = || {
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: writes this one structure.
            let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
            assert_eq!(code, 0);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        let begin = now();
        work();
        now() - begin
    }

    #[test]
    fn a_child_closes_what_is_not_its_own_and_nothing_else() {
        let (plain, kept) = (null(), CloseOnFork::open(|| Ok::<_, ()>(null())).unwrap());
        drop(CloseOnFork::from(null()));
        // Very likely the number that has just become free.
        let again = null();
        let numbers = [&plain, &*kept, &again].map(|one| one.as_raw_fd());
        assert!(in_child(|| numbers.map(is_open) == [true, false, true]));
        assert_eq!(numbers.map(is_open), [true; 3]);
    }

    #[test]
    fn a_child_drops_nothing_of_its_parent() {
        struct Told(u32);
        impl Drop for Told {
            fn drop(&mut self) {
                assert_eq!(self.0, std::process::id(), "dropped in a child");
            }
        }
        let kept = CloseOnFork::from(null());
        let owner = ProcessId::this();
        let ours = ForkOwned::new(Told(std::process::id()));
        assert!(in_child(move || {
            let number = kept.as_raw_fd();
            let other = ManuallyDrop::new(null());
            // SAFETY: the number is free, or that of `other`.
            unsafe { libc::dup2(other.as_raw_fd(), number) };
            drop(kept);
            drop(ours);
            // What has the number now is not what `kept` was.
            is_open(number) && owner.check().is_err() && ProcessId::this().is_this()
        }));
        assert!(owner.check().is_ok());
    }

    #[test]
    fn what_a_child_opens_is_its_own() {
        assert!(in_child(|| {
            let own = CloseOnFork::from(null());
            let number = own.as_raw_fd();
            let closed = in_child(|| !is_open(number));
            let stays = is_open(number);
            drop(own);
            closed && stays && !is_open(number)
        }));
    }

    /// The thread that was at it when the child was forked is not there to be waited for.
    #[test]
    fn a_child_of_a_fork_during_the_installation_installs_by_itself() {
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
    fn handlers_that_are_there_several_times_work_once() {
        assert!(in_child(|| {
            add_handlers();
            add_handlers();
            let own = CloseOnFork::from(null());
            let number = own.as_raw_fd();
            let before = FORKS.load(Ordering::Relaxed);
            let closed = in_child(|| {
                let closed = !is_open(number);
                // The table is free.
                drop(CloseOnFork::from(null()));
                closed && FORKS.load(Ordering::Relaxed) == before + 1
            });
            let stays = is_open(number);
            drop(own);
            closed && stays && !is_open(number)
        }));
    }

    /// The handlers as the C library calls them where another library's, which runs after ours,
    /// forks.
    #[test]
    fn a_child_closes_what_is_not_its_own_although_its_parent_forked_while_it_forked() {
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
            // The table is free.
            drop(CloseOnFork::from(null()));
            closed && FORKS.load(Ordering::Relaxed) == before + 1
        }));
    }

    /// No descriptor is between the kernel and the table when the process is copied.
    #[test]
    fn no_child_gets_what_is_just_opened_or_closed() {
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
