//! A stand-in for cubecl-llvm 0.11.3, with the names that cubecl-cuda 0.11.3 needs to compile and nothing behind them.
//!
//! The real crate's build downloads a prebuilt LLVM. This workspace compiles CUDA kernels through NVRTC instead
//! (feature `cubecl/cuda-cpp`), so LLVM would be fetched and never called. Selecting the LLVM compiler all the same
//! fails with a message that says so.

use cubecl_core::{ir::nvidia::SmArch, prelude::KernelDefinition};
use cubecl_server::{
    compiler::{CompilationError, Compiler},
    kernel::BufferIOAttr,
};

const NOT_BUILT: &str = "the LLVM compiler is not built in; enable the feature `cubecl/cuda-cpp` (burn-vae's `hopper`)";

pub mod nvptx {
    pub mod ptx_version {
        use core::fmt;

        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(u32);

        impl PtxVersion {
            /// No driver's PTX is ever emitted here.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "ptx{}", self.0)
            }
        }
    }
}

pub mod shared {
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            Nvptx,
        }

        pub fn restrict_features(_properties: &mut DeviceProperties, _target: GpuTarget) {}
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    #[default]
    Nvptx,
}

#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    pub target: LlvmTarget,
}

#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    pub arch: Option<()>,
    pub sm_arch: Option<SmArch>,
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    pub grid_constants: bool,
    /// Keeps `..Default::default()` meaningful for callers that name every other field.
    pub reserved: (),
}

#[derive(Clone, Debug)]
pub struct NvptxModule {
    pub ptx: Vec<core::ffi::c_char>,
    pub entrypoint: String,
    pub ir: String,
    pub shared_memory_size: usize,
    pub io: Vec<BufferIOAttr>,
}

#[derive(Clone, Debug)]
pub enum PlironArtifact {
    NvptxCode(NvptxModule),
    Unavailable,
}

impl core::fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(NOT_BUILT)
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn buffer_io(_artifact: &PlironArtifact) -> Option<Vec<BufferIOAttr>> {
        None
    }

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        panic!("{NOT_BUILT}")
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "ptx"
    }
}
