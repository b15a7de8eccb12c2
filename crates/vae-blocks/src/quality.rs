use std::{fmt, str::FromStr};

/// How a decode may compute, chosen per call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Quality {
    /// Stock Burn operations in the order of the original model, GroupNorm statistics in f32.
    #[default]
    Lossless,
    /// The same mathematics re-associated and fused, by the fastest kernels the device has. Where it cannot run it is
    /// refused, never replaced.
    High,
}

impl Quality {
    /// Both gates, the default first.
    pub const ALL: [Self; 2] = [Self::Lossless, Self::High];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lossless => "lossless",
            Self::High => "high",
        }
    }
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Quality {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|quality| quality.name() == name)
            .ok_or_else(|| format!("`{name}` is not a quality, use lossless or high"))
    }
}
