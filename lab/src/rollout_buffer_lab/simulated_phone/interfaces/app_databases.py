"""Apps of AndroidWorld that have no screens on this phone: their names and their database files.

Their tasks can be set up, read and torn down with these files, but not played by touch. The tables have the columns
that AndroidWorld reads and writes; all have defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_buffer_lab.simulated_phone.device_state.packages import InstalledApp


def _app(label: str, package: str, activity: str) -> InstalledApp:
    return InstalledApp(label=label, package=package, activity=activity, icon="")


APPS_WITHOUT_SCREENS: tuple[InstalledApp, ...] = (
    _app("Chrome", "com.android.chrome", "com.google.android.apps.chrome.Main"),
    _app("Simple Gallery Pro", "com.simplemobiletools.gallery.pro", ".activities.MainActivity"),
    _app("Simple Draw Pro", "com.simplemobiletools.draw.pro", ".activities.MainActivity"),
    _app("Pro Expense", "com.arduia.expense", ".ui.MainActivity"),
    _app("Broccoli", "com.flauschcode.broccoli", ".MainActivity"),
    _app("OsmAnd", "net.osmand", ".plus.activities.MapActivity"),
    _app("Tasks", "org.tasks", "com.todoroo.astrid.activity.MainActivity"),
    _app("OpenTracks", "de.dennisguse.opentracks", ".TrackListActivity"),
    _app("Joplin", "net.cozic.joplin", ".MainActivity"),
    _app("VLC", "org.videolan.vlc", ".gui.MainActivity"),
    _app("Retro Music", "code.name.monkey.retromusic", ".activities.MainActivity"),
)

APP_FOLDERS = (
    "/storage/emulated/0/VLCVideos",
    "/storage/emulated/0/Android/data/net.osmand/files/tracks",
    "/storage/emulated/0/Android/data/net.osmand/files/favorites",
    "/data/data/net.osmand/files/backup",
)


def _table(table: str, first_column: str, /, **columns: str) -> str:
    """Returns the SQL of a table. ``first_column`` is SQL; the others are given by kind.

    Kinds: i integer, r real, t text, b bytes; a column with a capital letter may be null.
    """
    kinds = {"i": "INTEGER", "r": "REAL", "t": "TEXT", "b": "BLOB"}
    defaults = {"i": "0", "r": "0", "t": "''", "b": "x''"}
    lines = [first_column]
    for column, kind in columns.items():
        null = "" if kind.isupper() else f" NOT NULL DEFAULT {defaults[kind.lower()]}"
        lines.append(f'"{column}" {kinds[kind.lower()]}{null}')
    return f'CREATE TABLE "{table}" ({", ".join(lines)});\n'


_JOPLIN_TIMES = {"created_time": "i", "updated_time": "i", "user_created_time": "i", "user_updated_time": "i"}
_JOPLIN_PLACE = {"latitude": "r", "longitude": "r", "altitude": "r"}

APP_DATABASES: Mapping[str, str] = {
    "/data/data/com.arduia.expense/databases/accounting.db": _table(
        "expense", "expense_id INTEGER PRIMARY KEY AUTOINCREMENT",
        name="t", amount="i", category="i", note="T", created_date="i", modified_date="i",
    ),
    "/data/data/com.flauschcode.broccoli/databases/broccoli": _table(
        "recipes", "recipeId INTEGER PRIMARY KEY AUTOINCREMENT",
        title="t", description="t", servings="t", preparationTime="t", source="t", ingredients="t", directions="t",
        favorite="i", imageName="t",
    ),
    "/data/data/org.tasks/databases/database": _table(
        "tasks", "_id INTEGER PRIMARY KEY AUTOINCREMENT",
        title="T", importance="i", dueDate="i", hideUntil="i", created="i", modified="i", completed="i", deleted="i",
        notes="T", estimatedSeconds="i", elapsedSeconds="i", timerStart="i", notificationFlags="i", lastNotified="i",
        recurrence="T", repeat_from="i", calendarUri="T", remoteId="T", collapsed="i", parent="i", order="I",
        read_only="i",
    ),
    "/data/data/de.dennisguse.opentracks/databases/database.db": _table(
        "tracks", "_id INTEGER PRIMARY KEY AUTOINCREMENT",
        name="t", description="t", category="t", activity_type="t", starttime="i", stoptime="i", numpoints="i",
        totaldistance="r", totaltime="i", movingtime="i", avgspeed="r", avgmovingspeed="r", maxspeed="r",
        minelevation="r", maxelevation="r", elevationgain="r", icon="T", uuid="B", elevationloss="r",
        starttime_offset="i",
    ),
    "/data/data/net.cozic.joplin/databases/joplin.sqlite": _table(
        "folders", "id TEXT PRIMARY KEY",
        title="t", **_JOPLIN_TIMES, deleted_time="i", encryption_cipher_text="t", encryption_applied="i",
        parent_id="t", is_shared="i", share_id="t", master_key_id="t", icon="t", user_data="t",
    ) + _table(
        "notes", "id TEXT PRIMARY KEY",
        parent_id="t", title="t", body="t", **_JOPLIN_TIMES, **_JOPLIN_PLACE, is_conflict="i", author="t",
        source_url="t", is_todo="i", todo_due="i", todo_completed="i", source="t", source_application="t",
        application_data="t", order="r", encryption_cipher_text="t", encryption_applied="i", markup_language="i",
        is_shared="i", share_id="t", conflict_original_id="t", master_key_id="t", user_data="t",
    ) + _table(
        "notes_normalized", "id TEXT PRIMARY KEY",
        parent_id="t", title="t", body="t", **_JOPLIN_PLACE, source_url="t", is_todo="i", todo_due="i",
        todo_completed="i", user_created_time="i", user_updated_time="i",
    ),
    "/data/data/org.videolan.vlc/app_db/vlc_media.db": _table(
        "Playlist", "id_playlist INTEGER PRIMARY KEY AUTOINCREMENT", name="T",
    ) + _table(
        "Media", "id_media INTEGER PRIMARY KEY AUTOINCREMENT", filename="T",
    ) + _table(
        "PlaylistMediaRelation", "media_id INTEGER", playlist_id="I", position="I",
    ),
    "/data/data/code.name.monkey.retromusic/databases/playlist.db": _table(
        "PlaylistEntity", "playlist_id INTEGER PRIMARY KEY AUTOINCREMENT", playlist_name="t",
    ) + _table(
        "SongEntity", "song_key INTEGER PRIMARY KEY AUTOINCREMENT", playlist_creator_id="i", title="t", duration="i",
    ),
    "/data/data/code.name.monkey.retromusic/databases/music_playback_state.db": _table(
        "playing_queue", "_id INTEGER PRIMARY KEY AUTOINCREMENT", title="t",
    ),
    "/data/data/net.osmand/databases/map_markers_db": _table(
        "map_markers", "marker_id TEXT PRIMARY KEY",
        marker_lat="r", marker_lon="r", marker_description="t", marker_active="i", marker_added="i",
        marker_visited="i", group_name="t", group_key="t", marker_color="i", marker_next_key="t",
        marker_disabled="i", marker_selected="i", marker_map_object_name="t", title="t",
    ),
}  # fmt: skip
