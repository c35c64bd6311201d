// Reads every entry of a ZIP file twice with java.util.zip: `java ReadZip.java STORE`.
// Prints per entry: by "directory" or by "stream" (which checks the CRC-32), name, bytes, SHA-256.
import java.io.BufferedInputStream;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.security.MessageDigest;
import java.util.HexFormat;
import java.util.zip.ZipEntry;
import java.util.zip.ZipFile;
import java.util.zip.ZipInputStream;

public class ReadZip {
    public static void main(String[] arguments) throws Exception {
        try (var zip = new ZipFile(arguments[0])) {
            System.out.println("comment " + zip.getComment());
            for (ZipEntry entry : zip.stream().toList()) {
                try (InputStream data = zip.getInputStream(entry)) {
                    print("directory", entry, data);
                }
            }
        }
        try (var zip = new ZipInputStream(new BufferedInputStream(new FileInputStream(arguments[0])))) {
            for (ZipEntry entry = zip.getNextEntry(); entry != null; entry = zip.getNextEntry()) {
                print("stream", entry, zip);
            }
        }
    }

    private static void print(String how, ZipEntry entry, InputStream data) throws Exception {
        byte[] bytes = data.readAllBytes();
        byte[] digest = MessageDigest.getInstance("SHA-256").digest(bytes);
        System.out.println(how + " " + entry.getName() + " " + bytes.length + " " + HexFormat.of().formatHex(digest));
    }
}
