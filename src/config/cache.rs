//! Directories of the user: for files that the library keeps between runs, and for the sockets of running processes.

use std::ffi::OsString;
use std::path::PathBuf;

/// Returns the folder `cinch` of the user's cache directory: of `XDG_CACHE_HOME`, or of `.cache` in `HOME`. `None` if
/// neither is an absolute path.
pub fn cache_directory() -> Option<PathBuf> {
    of_environment(&|name| std::env::var_os(name))
}

/// Returns the folder `cinch` of the user's directory for running processes, `XDG_RUNTIME_DIR`. `None` if that is no
/// absolute path.
pub fn runtime_directory() -> Option<PathBuf> {
    let directory = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)?;
    directory.is_absolute().then(|| directory.join("cinch"))
}

fn of_environment(environment: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| {
        environment(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
    Some(cache.join("cinch"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_is_below_an_absolute_path_of_the_environment() {
        let of = |cache: &str, home: &str| {
            of_environment(&|name| {
                let value = if name == "HOME" { home } else { cache };
                (!value.is_empty()).then(|| value.into())
            })
        };
        assert_eq!(of("/cache", "/home/a"), Some("/cache/cinch".into()));
        assert_eq!(of("cache", "/home/a"), Some("/home/a/.cache/cinch".into()));
        assert_eq!(of("", "/home/a"), Some("/home/a/.cache/cinch".into()));
        assert_eq!(of("", "a"), None);
        assert_eq!(of("", ""), None);
    }
}
