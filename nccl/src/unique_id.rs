//! The unique id that ranks share before they are connected.

use crate::boundary::CallProgress;
use crate::settings;
use crate::types::*;
use cinch::capi::core::arguments::{self, unique_id_bytes};
use cinch::{Config, Error, Result, UniqueId};

export! {
    /// Creates the id of one communicator, for the program to send to all its ranks. This process
    /// serves their rendezvous.
    fn ncclGetUniqueId | pncclGetUniqueId(uniqueId: *mut ncclUniqueId) {
        check_out("uniqueId", uniqueId)?;
        let internal = unique_id_bytes(&create(&settings::process()?)?);
        // SAFETY: nccl.h requires of the program that `uniqueId` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("uniqueId", uniqueId, ncclUniqueId { internal })? };
        Ok(CallProgress::Done)
    }
}

/// Returns a new id, or the id of the rendezvous address in the environment if that is set.
pub(crate) fn create(config: &Config) -> Result<UniqueId> {
    let Some(address) = &config.comm_id else {
        return UniqueId::create(config);
    };
    let (host, port) = address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)))
        .ok_or_else(|| {
            Error::invalid_argument(format!("CINCH_COMM_ID=\"{address}\" is not host:port"))
        })?;
    UniqueId::for_address(host, port, config)
}

/// Returns the id that C passed.
pub(crate) fn from_c(id: &ncclUniqueId) -> Result<UniqueId> {
    arguments::unique_id(&id.internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_survives_round_trip() {
        let id = UniqueId::create_for_one_host(&Config::default()).unwrap();
        let internal = unique_id_bytes(&id);
        assert_eq!(from_c(&ncclUniqueId { internal }).unwrap(), id);
        id.cancel();
        let nothing = ncclUniqueId { internal: [0; 128] };
        assert!(from_c(&nothing).unwrap_err().message().contains("zeros"));
    }

    #[test]
    fn address_of_the_environment_is_the_rendezvous() {
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
