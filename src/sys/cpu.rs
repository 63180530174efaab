//! Cores.

/// Cores that this process may run on; 1 if the system does not say.
pub fn available() -> usize {
    // SAFETY: `set` is plain data of the size that is passed; zero is a valid value of it.
    let count = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => libc::CPU_COUNT(&set),
            _ => 0,
        }
    };
    match usize::try_from(count) {
        Ok(count) if count > 0 => count,
        // More cores than the set holds.
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_is_a_core() {
        assert!(super::available() >= 1);
    }
}
