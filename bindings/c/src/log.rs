//! The library's log: silent unless `FLASHTUNE_LOG` asks, as a library should be.

use std::sync::Once;
use tracing_subscriber::EnvFilter;

/// Logs to stderr what `FLASHTUNE_LOG` names, if it is set. The first call counts.
pub(crate) fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("FLASHTUNE_LOG").is_none_or(|v| v.is_empty()) {
            return;
        }
        let filter = EnvFilter::try_from_env("FLASHTUNE_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
        let _ = log.without_time().compact().try_init();
    });
}
