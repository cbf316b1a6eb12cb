use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{Client, ClientError, ClientTls, Server};

/// Under which heading of a program's help there is how it gets to the controller.
pub const CONTROLLER: &str = "The controller";

/// Who somebody is at the command line, and whom he trusts.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// A file with the token that says who you are, for a controller that asks for one
    #[arg(long, global = true, env = "WADI_TOKEN_FILE", help_heading = CONTROLLER, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Over https.
    #[command(flatten)]
    pub tls: ClientTls,
}

impl Credentials {
    /// A client that says so.
    pub fn client(&self, server: &Server) -> Result<Client, ClientError> {
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        Ok(Client::with_tls(server.clone(), &self.tls)?.with_token(token))
    }
}

fn read_token(path: &Path) -> Result<String, ClientError> {
    let failed = |reason: String| ClientError::SetUp(io::Error::other(reason));
    let text = fs::read_to_string(path)
        .map_err(|error| failed(format!("cannot read the token in {}: {error}", path.display())))?;
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(failed(format!("{} has no token in it, or more than that", path.display())));
    }
    Ok(token.to_owned())
}
