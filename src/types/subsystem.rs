//! Parts of the library that the log can be narrowed to, with NCCL's names.

use std::fmt;

/// What a line of the log is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Subsystem {
    /// Joining, and what a communicator is made of.
    Init,
    /// Each collective.
    Coll,
    /// Peer memory between GPUs.
    P2p,
    /// Shared and pinned host memory.
    Shm,
    /// The network.
    Net,
    /// The graph of the machine.
    Graph,
    /// Selection of algorithms.
    Tuning,
    /// The environment.
    Env,
    /// Memory.
    Alloc,
    /// Calls of the interface.
    Call,
    /// Network progress.
    Proxy,
    /// Rendezvous.
    Bootstrap,
    /// Registered buffers.
    Reg,
}

impl Subsystem {
    /// Every subsystem, in numeric order.
    pub const ALL: [Subsystem; 13] = [
        Subsystem::Init,
        Subsystem::Coll,
        Subsystem::P2p,
        Subsystem::Shm,
        Subsystem::Net,
        Subsystem::Graph,
        Subsystem::Tuning,
        Subsystem::Env,
        Subsystem::Alloc,
        Subsystem::Call,
        Subsystem::Proxy,
        Subsystem::Bootstrap,
        Subsystem::Reg,
    ];

    /// Name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Subsystem::Init => "INIT",
            Subsystem::Coll => "COLL",
            Subsystem::P2p => "P2P",
            Subsystem::Shm => "SHM",
            Subsystem::Net => "NET",
            Subsystem::Graph => "GRAPH",
            Subsystem::Tuning => "TUNING",
            Subsystem::Env => "ENV",
            Subsystem::Alloc => "ALLOC",
            Subsystem::Call => "CALL",
            Subsystem::Proxy => "PROXY",
            Subsystem::Bootstrap => "BOOTSTRAP",
            Subsystem::Reg => "REG",
        }
    }
}

/// Some of the subsystems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subsystems(u16);

impl Subsystems {
    /// All of them.
    pub const ALL: Subsystems = Subsystems((1 << Subsystem::ALL.len()) - 1);
    /// What is of interest when nothing is said, as in NCCL.
    pub const DEFAULT: Subsystems = Subsystems(
        1 << Subsystem::Init as u16 | 1 << Subsystem::Env as u16 | 1 << Subsystem::Bootstrap as u16,
    );

    /// Whether `one` is among them.
    pub const fn has(self, one: Subsystem) -> bool {
        self.0 & 1 << one as u16 != 0
    }

    /// Names with commas between, `ALL` among them; after `^`, all but these. Case does not
    /// matter. Second, names that are none of ours.
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
    fn lists_and_their_opposites() {
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
        for (number, one) in Subsystem::ALL.into_iter().enumerate() {
            assert_eq!(one as usize, number);
        }
    }
}
