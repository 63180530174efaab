//! What a job's ranks share before they are connected.

use crate::boundary::CallProgress;
use crate::settings;
use crate::types::*;
use cinch::{Config, Error, Result, UniqueId};
use std::ffi::c_char;

export! {
    /// Makes an id for one communicator, to be handed to all its ranks. They meet in this process.
    fn ncclGetUniqueId | pncclGetUniqueId(uniqueId: *mut ncclUniqueId) {
        check_out("uniqueId", uniqueId)?;
        let id = to_c(&create(&settings::process()?)?);
        // SAFETY: not NULL, so writable.
        unsafe { store("uniqueId", uniqueId, id)? };
        Ok(CallProgress::Done)
    }
}

/// A new id, or that of the address where the environment says that ranks meet.
pub(crate) fn create(config: &Config) -> Result<UniqueId> {
    let Some(address) = &config.comm_id else {
        return UniqueId::create(config);
    };
    let (host, port) = address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)))
        .ok_or_else(|| {
            Error::invalid_argument(format!("CINCH_COMM_ID=\"{address}\" is no host:port"))
        })?;
    UniqueId::for_address(host, port, config)
}

/// The id that C passed.
pub(crate) fn from_c(id: &ncclUniqueId) -> Result<UniqueId> {
    UniqueId::from_bytes(&id.internal.map(|byte| byte as u8))
}

fn to_c(id: &UniqueId) -> ncclUniqueId {
    ncclUniqueId {
        internal: id.as_bytes().map(|byte| byte as c_char),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_round_trip() {
        let id = UniqueId::create_for_one_host(&Config::default()).unwrap();
        assert_eq!(from_c(&to_c(&id)).unwrap(), id);
        id.cancel();
        let nothing = ncclUniqueId { internal: [0; 128] };
        assert!(from_c(&nothing).unwrap_err().message().contains("zeros"));
    }

    #[test]
    fn an_address_of_the_environment_is_the_meeting() {
        let at = |address: &str| {
            create(&Config {
                comm_id: Some(address.into()),
                ..Config::default()
            })
        };
        assert_eq!(
            at("127.0.0.1:4000").unwrap(),
            UniqueId::for_address("127.0.0.1", 4000, &Config::default()).unwrap()
        );
        assert_eq!(
            at("[::1]:4000").unwrap(),
            UniqueId::for_address("::1", 4000, &Config::default()).unwrap()
        );
        for address in ["127.0.0.1", "127.0.0.1:port", "127.0.0.1:70000"] {
            assert!(at(address).unwrap_err().message().contains(address));
        }
    }
}
