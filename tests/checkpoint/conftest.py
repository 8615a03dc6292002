from tests.embedded_fixture import embedded_folder

__all__ = ["embedded_folder"]
