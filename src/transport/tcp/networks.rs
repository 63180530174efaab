//! Chooses the network of a pair of ranks by distance.
//!
//! A rank is reached at the address that the rendezvous knows. If both ranks of a pair have an interface in one further
//! network that is no slower, and nearer to their GPUs or cores in all, the pair uses that network. A network that is
//! nearly twice as fast ([`is_too_slow`]) wins at any distance. Pairs take turns among
//! equally near networks, so that the interfaces of a host share the load of its ranks. The rank that
//! connects decides alone, by what both ranks offer, and goes back to the known address if no connection comes about.

use crate::bootstrap::HostAddress;
use crate::topology::{InterfaceDistance, PathType, is_too_slow, path_number, path_of_number};
use crate::wire::{Damaged, Reader, Wire, WireResult, Writer};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// An address at which a rank listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressFacts {
    pub ip: IpAddr,
    pub port: u16,
    /// Number of leading bits that all addresses of the network have in common; 0 if unknown.
    pub prefix: u8,
    /// Speed of the interface in Mbit/s; 0 if unknown.
    pub speed: u32,
    /// Class of the path from the rank to the interface; `None` if it is unknown.
    pub path: Option<PathType>,
}

impl AddressFacts {
    /// Returns the facts about an address, by what this host knows about its interfaces.
    pub fn new(
        bound: SocketAddr,
        addresses: &[HostAddress],
        distances: &[InterfaceDistance],
    ) -> AddressFacts {
        let own = addresses.iter().find(|one| one.ip == bound.ip());
        let known = own.and_then(|own| distances.iter().find(|one| one.name == own.interface));
        AddressFacts {
            ip: bound.ip(),
            port: bound.port(),
            prefix: own.map_or(0, |own| own.prefix),
            speed: known.and_then(|known| known.speed).unwrap_or(0),
            path: known.and_then(|known| known.path),
        }
    }

    /// Returns address family, leading bits and their number; `None` if the network is unknown.
    fn network(&self) -> Option<(bool, u128, u8)> {
        let (bits, width): (u128, u32) = match self.ip {
            IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
            IpAddr::V6(v6) => (v6.to_bits(), 128),
        };
        let rest = width.checked_sub(self.prefix.into())?;
        let leading = bits.checked_shr(rest).unwrap_or(0);
        (self.prefix > 0).then_some((width == 128, leading, self.prefix))
    }
}

impl Wire for AddressFacts {
    fn write(&self, writer: &mut Writer) {
        let ip = match self.ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        writer.put(&ip.octets()).u16(self.port).u8(self.prefix);
        writer.u32(self.speed).u8(path_number(self.path));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<AddressFacts> {
        let ip = Ipv6Addr::from(reader.take::<[u8; 16]>()?);
        Ok(AddressFacts {
            ip: IpAddr::V6(ip).to_canonical(),
            port: reader.u16()?,
            prefix: reader.u8()?,
            speed: reader.u32()?,
            path: path_of_number(reader.u8()?).ok_or(Damaged)?,
        })
    }
}

/// The addresses of a rank. The first is the address that the rendezvous knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddressOffer(pub Vec<AddressFacts>);

impl Wire for AddressOffer {
    fn write(&self, writer: &mut Writer) {
        writer.u16(self.0.len() as u16);
        self.0.iter().for_each(|one| one.write(writer));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<AddressOffer> {
        let count = reader.u16()?;
        let all = (0..count).map(|_| reader.take());
        let all: Vec<AddressFacts> = all.collect::<WireResult<_>>()?;
        (!all.is_empty())
            .then_some(AddressOffer(all))
            .ok_or(Damaged)
    }
}

impl AddressOffer {
    /// Returns the port at the address that the rendezvous knows.
    pub fn port(&self) -> u16 {
        self.0[0].port
    }

    /// Returns the address of this offer through which a rank with the addresses `own` reaches it in the nearest network
    /// that is fast enough: address number `turn` of those that are equally near, modulo their number. `None` if that is
    /// the first address of this offer, or if there is any doubt.
    pub fn nearer(&self, own: &AddressOffer, turn: usize) -> Option<&AddressFacts> {
        let (first, own_first) = (&self.0[0], &own.0[0]);
        let mut networks = vec![CommonNetwork::new(first, own_first)?];
        for theirs in &self.0[1..] {
            let network = theirs.network();
            let is_in = |one: &&AddressFacts| one.network() == network && network.is_some();
            let (mut here, there) = (own.0.iter().filter(is_in), self.0.iter().filter(is_in));
            let (Some(ours), None, 1) = (here.next(), here.next(), there.count()) else {
                // With two interfaces in one network the system decides which of them carries data.
                continue;
            };
            let is_slower = theirs.speed < first.speed || ours.speed < own_first.speed;
            let is_known = first.speed > 0 && own_first.speed > 0;
            // Equal addresses are those of one host, or of networks that each host has for itself.
            if is_slower || !is_known || theirs.ip == ours.ip || ours.ip == own_first.ip {
                continue;
            }
            networks.extend(CommonNetwork::new(theirs, ours));
        }
        let fastest = networks.iter().map(|one| one.speed).max()?;
        networks.retain(|one| !is_too_slow(one.speed, fastest) || fastest == 0);
        let least = networks.iter().map(|one| one.distance).min()?;
        networks.retain(|one| one.distance == least);
        let chosen = networks[turn % networks.len()].theirs;
        (!std::ptr::eq(chosen, first)).then_some(chosen)
    }
}

/// A network in which both ranks of a pair have an address.
struct CommonNetwork<'a> {
    theirs: &'a AddressFacts,
    /// Mbit/s of the slower end; 0 if unknown.
    speed: u32,
    distance: u8,
}

impl<'a> CommonNetwork<'a> {
    /// Returns the network of two addresses; `None` if a distance is unknown.
    fn new(theirs: &'a AddressFacts, ours: &AddressFacts) -> Option<CommonNetwork<'a>> {
        Some(CommonNetwork {
            theirs,
            speed: theirs.speed.min(ours.speed),
            distance: distance(theirs, ours)?,
        })
    }
}

/// Returns the distances of both ends in all; `None` if one is unknown.
fn distance(one: &AddressFacts, other: &AddressFacts) -> Option<u8> {
    let both = [path_number(one.path), path_number(other.path)];
    both.iter()
        .all(|number| *number > 0)
        .then(|| both.iter().sum())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use PathType::{Phb, Pix, Sys};

    fn facts(ip: &str, path: impl Into<Option<PathType>>) -> AddressFacts {
        AddressFacts {
            ip: ip.parse().unwrap(),
            port: 7,
            prefix: 24,
            speed: 100_000,
            path: path.into(),
        }
    }

    #[test]
    fn pair_uses_a_common_network_that_is_nearer() {
        let own = AddressOffer(vec![facts("10.0.0.1", Sys), facts("10.0.1.1", Phb)]);
        let found = |theirs: Vec<AddressFacts>| {
            let theirs = AddressOffer(theirs);
            theirs.nearer(&own, 0).map(|one| one.ip.to_string())
        };
        let first = facts("10.0.0.2", Sys);
        let near = facts("10.0.1.2", Phb);
        assert_eq!(found(vec![first, near]), Some("10.0.1.2".into()));
        let nearest = facts("10.0.1.2", Pix);
        assert_eq!(found(vec![first, nearest]), Some("10.0.1.2".into()));
        for (theirs, why) in [
            (vec![first], "no other address"),
            (
                vec![facts("10.0.0.2", None), near],
                "the first distance is unknown",
            ),
            (
                vec![first, facts("10.0.1.2", None)],
                "the distance is unknown",
            ),
            (
                vec![facts("10.0.0.2", Pix), facts("10.0.1.2", Sys)],
                "not nearer in all",
            ),
            (vec![first, facts("10.0.2.2", Phb)], "another network"),
            (
                vec![first, AddressFacts { prefix: 16, ..near }],
                "another prefix",
            ),
            (
                vec![first, AddressFacts { prefix: 0, ..near }],
                "no network",
            ),
            (
                vec![
                    first,
                    AddressFacts {
                        prefix: 200,
                        ..near
                    },
                ],
                "no such prefix",
            ),
            (
                vec![
                    first,
                    AddressFacts {
                        speed: 1000,
                        ..near
                    },
                ],
                "slower",
            ),
            (
                vec![first, AddressFacts { speed: 0, ..near }],
                "unknown speed",
            ),
            (vec![first, facts("10.0.1.1", Phb)], "the same address"),
            (
                vec![first, near, facts("10.0.1.3", Sys)],
                "two interfaces in it",
            ),
        ] {
            assert_eq!(found(theirs), None, "{why}");
        }
    }

    #[test]
    fn network_of_twice_the_speed_wins_though_it_is_farther() {
        let offer = |host: u8, speed: u32| {
            let near = facts(&format!("10.0.0.{host}"), Pix);
            let far = facts(&format!("10.0.1.{host}"), Sys);
            AddressOffer(vec![near, AddressFacts { speed, ..far }])
        };
        let found = |speeds: [u32; 2]| {
            let theirs = offer(2, speeds[1]);
            let found = theirs.nearer(&offer(1, speeds[0]), 1);
            found.map(|one| one.ip.to_string())
        };
        let far = Some("10.0.1.2".to_string());
        assert_eq!(found([200_000, 400_000]), far);
        assert_eq!(found([192_000, 200_000]), far, "the PCIe link is slower");
        assert_eq!(found([200_000, 160_000]), None, "less than 9/5 at one end");
        assert_eq!(found([200_000, 0]), None, "unknown");
    }

    #[test]
    fn pairs_take_turns_among_equally_near_networks() {
        let own = [("10.0.0.1", Pix), ("10.0.1.1", Phb), ("10.0.2.1", Pix)];
        let theirs = [("10.0.0.2", Phb), ("10.0.1.2", Pix), ("10.0.2.2", Sys)];
        let offer = |all: &[(&str, PathType)]| {
            AddressOffer(all.iter().map(|&(ip, path)| facts(ip, path)).collect())
        };
        let found = |own: &AddressOffer, theirs: &AddressOffer| {
            [0, 1, 2, 3].map(|turn| theirs.nearer(own, turn).map(|one| one.ip.to_string()))
        };
        // The third network is farther.
        let second = Some("10.0.1.2".to_string());
        let in_turn = [None, second.clone(), None, second.clone()];
        assert_eq!(found(&offer(&own), &offer(&theirs)), in_turn);
        // Two networks are nearer than the first.
        let theirs = [("10.0.0.2", Sys), ("10.0.1.2", Pix), ("10.0.2.2", Phb)];
        let third = Some("10.0.2.2".to_string());
        let in_turn = [second.clone(), third.clone(), second, third];
        assert_eq!(found(&offer(&own), &offer(&theirs)), in_turn);
        // A slower network takes no turn.
        let mut slower = offer(&theirs);
        slower.0[2].speed = 1000;
        let alone = found(&offer(&own), &slower);
        assert!(alone.iter().all(|ip| ip.as_deref() == Some("10.0.1.2")));
    }

    #[test]
    fn offers_survive_bytes_and_damage_is_detected() {
        let offer = AddressOffer(vec![facts("10.0.0.1", Sys), facts("2001:db8::1", None)]);
        let bytes = offer.to_bytes();
        assert_eq!(AddressOffer::from_bytes(&bytes).unwrap(), offer);
        assert!((0..bytes.len()).all(|cut| AddressOffer::from_bytes(&bytes[..cut]).is_err()));
        assert!(AddressOffer::from_bytes(&AddressOffer(Vec::new()).to_bytes()).is_err());
    }
}
