"""Cases that clients depend on, against any server: `lmkit conform URL`. It knows servers by HTTP alone."""
