//! Parts of the library to which the log can be narrowed, with NCCL's names.

use super::named_enum::named_enum;
use std::fmt;

named_enum! {
    /// A part of the library from which a line of the log comes.
    Subsystem {
        /// Init of a communicator: its transports, slots and settings.
        Init = 0, "INIT";
        /// Calls of collectives.
        Coll = 1, "COLL";
        /// Peer memory between GPUs.
        P2p = 2, "P2P";
        /// Shared memory between processes, and pinned host memory.
        Shm = 3, "SHM";
        /// Network transports.
        Net = 4, "NET";
        /// Detection of the machine's topology.
        Graph = 5, "GRAPH";
        /// Selection of algorithms.
        Tuning = 6, "TUNING";
        /// Environment variables.
        Env = 7, "ENV";
        /// Allocation of memory.
        Alloc = 8, "ALLOC";
        /// Calls of the C interface.
        Call = 9, "CALL";
        /// Progress of network transfers by proxy threads.
        Proxy = 10, "PROXY";
        /// Rendezvous of the ranks when a communicator is created.
        Bootstrap = 11, "BOOTSTRAP";
        /// Registration of user buffers.
        Reg = 12, "REG";
    }
}

/// A set of subsystems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subsystems(u16);

impl Subsystems {
    /// All subsystems.
    pub const ALL: Subsystems = Subsystems((1 << Subsystem::ALL.len()) - 1);
    /// NCCL's default of NCCL_DEBUG_SUBSYS: `INIT`, `ENV` and `BOOTSTRAP`.
    pub const DEFAULT: Subsystems = Subsystems(
        1 << Subsystem::Init as u16 | 1 << Subsystem::Env as u16 | 1 << Subsystem::Bootstrap as u16,
    );

    /// Returns whether `one` is in the set.
    pub const fn has(self, one: Subsystem) -> bool {
        self.0 & 1 << one as u16 != 0
    }

    /// Parses names that are separated by commas; `ALL` names all subsystems, and a leading `^`
    /// excludes the named subsystems. Case does not matter. Returns the set and the unknown names.
    pub fn parse(text: &str) -> (Subsystems, Vec<&str>) {
        let (list, inverted) = match text.trim().strip_prefix('^') {
            Some(list) => (list, true),
            None => (text.trim(), false),
        };
        let (mut bits, mut unknown) = (0, Vec::new());
        for name in list.split(',').map(str::trim) {
            let known = Subsystem::ALL
                .into_iter()
                .find(|one| one.name().eq_ignore_ascii_case(name));
            match known {
                Some(one) => bits |= 1 << one as u16,
                None if name.eq_ignore_ascii_case("ALL") => bits = Subsystems::ALL.0,
                None => unknown.push(name),
            }
        }
        let bits = if inverted {
            Subsystems::ALL.0 & !bits
        } else {
            bits
        };
        (Subsystems(bits), unknown)
    }
}

impl fmt::Display for Subsystems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Subsystems::ALL {
            return f.write_str("ALL");
        }
        let names: Vec<&str> = Subsystem::ALL
            .into_iter()
            .filter(|&one| self.has(one))
            .map(Subsystem::name)
            .collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_with_caret_is_the_complement() {
        let (some, unknown) = Subsystems::parse("coll, P2P");
        assert!(some.has(Subsystem::Coll) && some.has(Subsystem::P2p) && unknown.is_empty());
        assert!(!some.has(Subsystem::Init));
        let (others, _) = Subsystems::parse("^COLL,P2P");
        for one in Subsystem::ALL {
            assert_ne!(some.has(one), others.has(one));
        }
        assert_eq!(Subsystems::parse("ALL").0, Subsystems::ALL);
        assert_eq!(Subsystems::parse("INIT,NVLS").1, ["NVLS"]);
        assert_eq!(Subsystems::DEFAULT.to_string(), "INIT,ENV,BOOTSTRAP");
    }
}
