//! Reads `ncclConfig_t`, the options of one communicator.

use crate::types::NCCL_API_MAGIC;
use crate::versioned::{self, Unset};
use cinch::config::{Config, Origin};
use cinch::{Error, Result};
use std::ffi::{CStr, c_char, c_int};

const INT: c_int = c_int::UNSET;
const TEXT: *const c_char = <*const c_char>::UNSET;

versioned! {
    /// The struct `ncclConfig_t` as in NCCL 2.32. In 2.14 it ended after `blocking`.
    struct ncclConfig_t, "NCCL_CONFIG_INITIALIZER", magic NCCL_API_MAGIC;
    blocking: c_int = INT, since 21400;
    cgaClusterSize: c_int = INT, since 21700;
    minCTAs: c_int = INT, since 21700;
    maxCTAs: c_int = INT, since 21700;
    netName: *const c_char = TEXT, since 21700;
    splitShare: c_int = INT, since 21800;
    trafficClass: c_int = INT, since 22600;
    commName: *const c_char = TEXT, since 22700;
    collnetEnable: c_int = INT, since 22700;
    CTAPolicy: c_int = INT, since 22700;
    shrinkShare: c_int = INT, since 22700;
    nvlsCTAs: c_int = INT, since 22700;
    nChannelsPerNetPeer: c_int = INT, since 22800;
    nvlinkCentricSched: c_int = INT, since 22800;
    graphUsageMode: c_int = INT, since 22900;
    numRmaCtx: c_int = INT, since 22900;
    maxP2pPeers: c_int = INT, since 23003;
    graphStreamOrdering: c_int = INT, since 23004;
    launchOrderImplicit: c_int = INT, since 23100;
    numRmaSig: c_int = INT, since 23100;
    rmaEagerInit: c_int = INT, since 23100;
    hostCftMode: c_int = INT, since 23100;
    nvlsHostMode: c_int = INT, since 23200;
}

/// Fields of [`ncclConfig_t`] that affect cinch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommOptions {
    /// Whether a call returns only when the operation that it starts has ended.
    pub(crate) blocking: bool,
    /// Largest number of thread blocks of a call.
    pub(crate) max_blocks: Option<usize>,
    /// Whether only CUDA graphs use the communicator, or the program itself orders graph launches
    /// with other calls.
    pub(crate) graphs_alone: bool,
    /// Name of the communicator.
    pub(crate) name: Option<String>,
    /// Whether a communicator that is split from this one fails with it (`splitShare`).
    pub(crate) shares: bool,
}

impl Default for CommOptions {
    fn default() -> CommOptions {
        CommOptions {
            blocking: true,
            max_blocks: None,
            graphs_alone: false,
            name: None,
            shares: false,
        }
    }
}

impl CommOptions {
    /// Reads the options at `config`; returns `None` for NULL.
    ///
    /// # Errors
    /// Invalid argument for a value out of range.
    ///
    /// # Safety
    /// `config` is NULL, or readable for the size that it gives, with valid strings.
    pub(crate) unsafe fn read(config: *const ncclConfig_t) -> Result<Option<CommOptions>> {
        // SAFETY: the caller passes `config` as NULL or readable for the size that it gives.
        let Some(config) = (unsafe { versioned::read(config)? }) else {
            return Ok(None);
        };
        let mut options = CommOptions::default();
        for (name, value) in [
            ("blocking", config.blocking),
            ("splitShare", config.splitShare),
            ("shrinkShare", config.shrinkShare),
            ("collnetEnable", config.collnetEnable),
            ("nvlinkCentricSched", config.nvlinkCentricSched),
        ] {
            if ![INT, 0, 1].contains(&value) {
                return Err(wrong(name, value, "0 or 1"));
            }
        }
        options.blocking = config.blocking != 0;
        options.shares = config.splitShare == 1;
        for (name, value) in [
            ("minCTAs", config.minCTAs),
            ("maxCTAs", config.maxCTAs),
            ("nvlsCTAs", config.nvlsCTAs),
            ("nChannelsPerNetPeer", config.nChannelsPerNetPeer),
        ] {
            if value != INT && value <= 0 {
                return Err(wrong(name, value, "a number above 0"));
            }
        }
        if config.cgaClusterSize != INT && config.cgaClusterSize < 0 {
            return Err(wrong("cgaClusterSize", config.cgaClusterSize, "0 or more"));
        }
        if config.CTAPolicy != INT && !(0..4).contains(&config.CTAPolicy) {
            return Err(wrong("CTAPolicy", config.CTAPolicy, "0 to 3"));
        }
        options.graphs_alone = match config.graphUsageMode {
            INT | 2 => false,
            0 | 1 => true,
            other => return Err(wrong("graphUsageMode", other, "0 to 2")),
        };
        if config.maxCTAs != INT {
            if config.minCTAs > config.maxCTAs {
                return Err(Error::invalid_argument(format!(
                    "minCTAs {} is above maxCTAs {} in the ncclConfig_t",
                    config.minCTAs, config.maxCTAs
                )));
            }
            options.max_blocks = usize::try_from(config.maxCTAs).ok();
        }
        if !config.commName.is_null() {
            // SAFETY: the caller passes valid strings, and the name is not NULL.
            let name = unsafe { CStr::from_ptr(config.commName) };
            options.name = Some(name.to_string_lossy().into_owned());
        }
        Ok(Some(options))
    }

    /// Returns `config` with these options applied.
    ///
    /// # Errors
    /// Invalid argument for a value out of range.
    pub(crate) fn apply(&self, mut config: Config) -> Result<Config> {
        if let Some(blocks) = self.max_blocks {
            config.bound_channels(blocks);
        }
        if self.graphs_alone {
            config.set("CINCH_GRAPH_MIXING", "0", Origin::Program)?;
        }
        if let Some(name) = &self.name {
            config.comm_name = name.clone();
        }
        Ok(config)
    }
}

fn wrong(name: &str, value: c_int, takes: &str) -> Error {
    Error::invalid_argument(format!(
        "{name} is {value} in the ncclConfig_t; it takes {takes}, or NCCL_CONFIG_UNDEF_INT"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versioned::NcclStruct;

    /// Versions of NCCL, each with the size of its struct and the number of fields after the
    /// header.
    const HISTORY: &[(u32, usize, usize)] = &[
        (21403, 24, 1),
        (21701, 40, 5),
        (21803, 48, 6),
        (21901, 48, 6),
        (22505, 48, 6),
        (22602, 48, 7),
        (22703, 72, 12),
        (22809, 80, 14),
        (22907, 88, 16),
        (23003, 96, 17),
        (23007, 96, 18),
        (23102, 112, 22),
        (23203, 120, 23),
    ];

    /// Returns the bytes of the struct that a program of this version passes: each field is set,
    /// and padding is garbage.
    fn of_version(version: u32, size: usize, fields: usize) -> Vec<u8> {
        let mut bytes = vec![0xa5; size];
        bytes[..8].copy_from_slice(&size.to_ne_bytes());
        bytes[8..12].copy_from_slice(&NCCL_API_MAGIC.to_ne_bytes());
        bytes[12..16].copy_from_slice(&version.to_ne_bytes());
        for &(name, at, _) in &ncclConfig_t::FIELDS[..fields] {
            match name {
                "netName" | "commName" => {
                    bytes[at..at + 8].copy_from_slice(&c"name".as_ptr().addr().to_ne_bytes())
                }
                _ => bytes[at..at + 4].copy_from_slice(&1i32.to_ne_bytes()),
            }
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Option<ncclConfig_t>> {
        // SAFETY: `bytes` is as long as its size field states; `read` rejects any other size.
        unsafe { versioned::read(bytes.as_ptr().cast()) }
    }

    #[test]
    fn config_of_every_version_is_read() {
        assert_eq!(size_of::<ncclConfig_t>(), 120);
        for &(version, size, fields) in HISTORY {
            let config = read(&of_version(version, size, fields)).unwrap().unwrap();
            let ints = [
                config.blocking,
                config.cgaClusterSize,
                config.minCTAs,
                config.maxCTAs,
                if config.netName.is_null() { INT } else { 1 },
                config.splitShare,
                config.trafficClass,
                if config.commName.is_null() { INT } else { 1 },
                config.collnetEnable,
                config.CTAPolicy,
                config.shrinkShare,
                config.nvlsCTAs,
                config.nChannelsPerNetPeer,
                config.nvlinkCentricSched,
                config.graphUsageMode,
                config.numRmaCtx,
                config.maxP2pPeers,
                config.graphStreamOrdering,
                config.launchOrderImplicit,
                config.numRmaSig,
                config.rmaEagerInit,
                config.hostCftMode,
                config.nvlsHostMode,
            ];
            assert_eq!(ints.len(), ncclConfig_t::FIELDS.len());
            for (at, value) in ints.into_iter().enumerate() {
                let name = ncclConfig_t::FIELDS[at].0;
                let expected = if at < fields { 1 } else { INT };
                assert_eq!(value, expected, "{name} of a config of {version}");
            }
        }
    }

    #[test]
    fn fields_of_later_version_are_ignored() {
        let mut bytes = of_version(29999, 400, 23);
        bytes[16..20].copy_from_slice(&0i32.to_ne_bytes());
        assert_eq!(read(&bytes).unwrap().unwrap().blocking, 0);
    }

    #[test]
    fn uninitialised_config_is_refused() {
        let mut bytes = of_version(22809, 80, 14);
        bytes[8] ^= 1;
        let error = read(&bytes).unwrap_err();
        assert!(
            error.message().contains("NCCL_CONFIG_INITIALIZER"),
            "{error}"
        );
        for size in [0usize, 8, 15] {
            let mut bytes = of_version(22809, 80, 14);
            bytes[..8].copy_from_slice(&size.to_ne_bytes());
            assert!(read(&bytes).is_err(), "size {size}");
        }
        // SAFETY: `read` accepts NULL.
        let nothing = unsafe { versioned::read::<ncclConfig_t>(std::ptr::null()) };
        assert!(nothing.unwrap().is_none());
    }

    #[test]
    fn values_out_of_range_are_named() {
        let ask = |change: &dyn Fn(&mut ncclConfig_t)| {
            let mut config = ncclConfig_t {
                version: 23203,
                ..ncclConfig_t::unset()
            };
            change(&mut config);
            // SAFETY: `config` is a complete struct of this test, whose strings are NULL or outlive
            // the call.
            unsafe { CommOptions::read(&config) }
        };
        assert_eq!(ask(&|_| {}).unwrap().unwrap(), CommOptions::default());
        let options = ask(&|config| {
            config.blocking = 0;
            config.maxCTAs = 7;
            config.commName = c"pipeline".as_ptr();
            config.splitShare = 1;
            config.graphUsageMode = 1;
        });
        let expected = CommOptions {
            blocking: false,
            max_blocks: Some(7),
            graphs_alone: true,
            name: Some("pipeline".into()),
            shares: true,
        };
        assert_eq!(options.unwrap().unwrap(), expected);
        // Tests that a `maxCTAs` above the default changes nothing.
        let applied = expected.apply(Config::default()).unwrap();
        assert_eq!(
            (
                applied.gpu_channels_for(1),
                applied.gpu_channels_for(2),
                applied.graph_mixing
            ),
            (7, 7, false)
        );
        let at_most = |blocks| CommOptions {
            max_blocks: Some(blocks),
            ..CommOptions::default()
        };
        assert_eq!(at_most(1000).apply(applied.clone()).unwrap(), applied);
        let wide = at_most(32).apply(Config::default()).unwrap();
        assert_eq!(
            (wide.gpu_channels_for(1), wide.gpu_channels_for(2)),
            (32, 8)
        );
        type Change = fn(&mut ncclConfig_t);
        let wrong: [(Change, &str); 7] = [
            (|config| config.blocking = 2, "blocking is 2"),
            (|config| config.splitShare = -1, "splitShare is -1"),
            (|config| config.maxCTAs = 0, "maxCTAs is 0"),
            (|config| config.cgaClusterSize = -4, "cgaClusterSize is -4"),
            (|config| config.CTAPolicy = 9, "CTAPolicy is 9"),
            (|config| config.graphUsageMode = 3, "graphUsageMode is 3"),
            (
                |config| (config.minCTAs, config.maxCTAs) = (8, 4),
                "minCTAs 8",
            ),
        ];
        for (change, said) in wrong {
            let error = ask(&change).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
    }
}
