//! What people write: configuration files, and requests to the API.

use std::path::Path;

use pod_api::{ByteSize, CreateInstance, CreateVolume};
use pod_controller::config::Config;
use pod_protocol::config::HostConfig;
use pod_protocol::ids::MacAddress;
use pod_state::{NAME_BYTES_MAX, check_name};
use vhost_blk_cxl::ssd::{SsdConfig, parse_size};
use vhost_net_cxl::nic::NicConfig;

/// Text of a host's or the controller's file.
pub fn configuration(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let one_line = |error: String| assert!(!error.contains('\n'), "{error:?}");
    match HostConfig::parse(text, Path::new("host.toml")) {
        Ok(config) => {
            assert!(config.host.id.get() > 0);
            for table in &config.nic {
                let _ = NicConfig::parse(table).map_err(|error| one_line(error.to_string()));
            }
            let _ = SsdConfig::parse_all(&config.ssd).map_err(|error| one_line(error.to_string()));
        }
        Err(error) => one_line(error.to_string()),
    }
    match Config::parse(text, Path::new("controller.toml")) {
        Ok(config) => {
            let _ = (config.detect(), config.fence_wait(), config.listen());
        }
        Err(error) => one_line(error.to_string()),
    }
}

/// A body of the API, or a word of it.
pub fn rest(data: &[u8]) {
    let names = |name: &str| check_name("it", name).is_ok();
    if let Ok(volume) = serde_json::from_slice::<CreateVolume>(data) {
        names(&volume.name);
    }
    if let Ok(instance) = serde_json::from_slice::<CreateInstance>(data) {
        names(&instance.name);
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if names(text) {
        assert!(text.len() <= NAME_BYTES_MAX && Path::new(text).components().count() == 1);
        assert!(!text.contains(['.', '/', ',', '\0', '\n']));
    }
    let size = text.parse::<ByteSize>().ok();
    if let Some(size) = size {
        let _ = size.to_string();
        assert_eq!(size.get().to_string().parse(), Ok(size));
    }
    let _ = parse_size(text);
    if let Ok(mac) = text.parse::<MacAddress>() {
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }
}
