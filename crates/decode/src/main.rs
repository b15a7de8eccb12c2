//! `decode`: saved diffusion latents to images.

fn main() -> std::process::ExitCode {
    decode::main()
}
