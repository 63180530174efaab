//! PCI addresses, such as `0000:c1:00.0`.

use std::fmt;
use std::str::FromStr;

/// A PCI address: domain, bus, device and function. Addresses sort by these four numbers in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BusId {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl BusId {
    /// Creates an address. `device` is below 32 and `function` below 8 on real buses; other values are kept,
    /// because NVSwitches of virtual machines have them.
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> BusId {
        BusId {
            domain,
            bus,
            device,
            function,
        }
    }

    /// Returns the PCI domain.
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// Returns the address of function 0 of this device.
    pub const fn of_device(self) -> BusId {
        BusId {
            function: 0,
            ..self
        }
    }
}

impl FromStr for BusId {
    type Err = ();

    /// Reads `0000:c1:00.0`, with a domain of 1 to 8 hexadecimal digits, or `c1:00.0` in domain 0.
    fn from_str(text: &str) -> Result<BusId, ()> {
        let hex = |text: &str, most: usize| {
            let digits =
                (1..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
            if digits {
                u32::from_str_radix(text, 16).map_err(|_| ())
            } else {
                Err(())
            }
        };
        let (front, function) = text.rsplit_once('.').ok_or(())?;
        let (front, device) = front.rsplit_once(':').ok_or(())?;
        let (domain, bus) = front.rsplit_once(':').unwrap_or(("0", front));
        Ok(BusId {
            domain: hex(domain, 8)?,
            bus: hex(bus, 2)? as u8,
            device: hex(device, 2)? as u8,
            function: hex(function, 1)? as u8,
        })
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BusId {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed_as_linux_does() {
        for text in ["0000:c1:00.0", "101c:00:1f.7", "fffffff:ff:ff.0"] {
            assert_eq!(text.parse::<BusId>().unwrap().to_string(), text);
        }
        assert_eq!("c1:00.0".parse(), Ok(BusId::new(0, 0xc1, 0, 0)));
        assert_eq!("0000:C1:00.0".parse(), Ok(BusId::new(0, 0xc1, 0, 0)));
        for text in [
            "",
            "0",
            "1:2",
            "1.0",
            "g:0.0",
            "0000:c1:00.",
            "0:0:0:0.0",
            "123456789:0:0.0",
            "0:+1:0.0",
        ] {
            assert_eq!(text.parse::<BusId>(), Err(()), "{text}");
        }
    }
}
