-- What admission allows at present. args: versions (of servers), servers, and those of `issuable`.
-- Returns {latest version, {groups that may be issued, by version}, {tickets held, by server}, epoch, position}: the next
-- task of the cursor last; no tickets are listed where nothing may be issued.
local allowed, held, most = {}, {}, 0
for i, version in ipairs(args.versions) do
  allowed[i] = issuable(version)
  most = math.max(most, allowed[i])
end
if most > 0 then
  for i, server in ipairs(args.servers) do held[i] = redis.call('SCARD', key('tickets_of:' .. server)) end
end
local meta = redis.call('HMGET', key('meta'), 'version', 'epoch', 'position')
return {tonumber(meta[1] or 0), allowed, held, tonumber(meta[2] or 0), tonumber(meta[3] or 0)}
