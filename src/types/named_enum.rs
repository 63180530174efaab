//! The macro that declares an enum together with the names of its variants.

/// Declares a `repr(u8)` enum from one table. Each line gives a variant's documentation, number and
/// name, and in the form `Enum as Facts` the value of `Facts` that describes it. Numbers must be
/// the places in the table, because `from_number` looks them up there; a wrong one fails to compile.
macro_rules! named_enum {
    ($(#[$meta:meta])* $enum:ident {
        $($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal;)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $enum {
            $($(#[$doc])* $variant = $number,)*
        }

        impl $enum {
            /// All variants, in ascending order of their numbers.
            pub const ALL: [$enum; [$($number),*].len()] = [$($enum::$variant),*];

            /// Returns the name, as settings, logs and tools print it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($enum::$variant => $name,)*
                }
            }

            /// Finds a variant by its name; the case of letters matters.
            pub fn from_name(name: &str) -> Option<$enum> {
                $enum::ALL.into_iter().find(|one| one.name() == name)
            }

            /// Finds a variant by its number.
            pub fn from_number(number: u32) -> Option<$enum> {
                $enum::ALL.get(number as usize).copied()
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        const _: () = {
            let mut place = 0;
            while place < $enum::ALL.len() {
                assert!($enum::ALL[place] as usize == place);
                place += 1;
            }
        };
    };
    ($(#[$meta:meta])* $enum:ident as $facts:ident {
        $($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $fact:expr;)*
    }) => {
        $crate::types::named_enum::named_enum! {
            $(#[$meta])* $enum {
                $($(#[$doc])* $variant = $number, $name;)*
            }
        }

        impl $enum {
            /// Returns the `Facts` value that the table gives for this variant.
            const fn facts(self) -> $facts {
                match self {
                    $($enum::$variant => $fact,)*
                }
            }
        }
    };
}

pub(super) use named_enum;
