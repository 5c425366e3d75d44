-- What admission allows at present. args: versions (of servers), servers, and those of `issuable`.
-- Returns {latest version, {groups that may be issued, by version}, {tickets held, by server}}; the latter is empty where
-- nothing may be issued.
local allowed, held, most = {}, {}, 0
for i, version in ipairs(args.versions) do
  allowed[i] = issuable(version)
  most = math.max(most, allowed[i])
end
if most > 0 then
  for i, server in ipairs(args.servers) do held[i] = redis.call('SCARD', key('tickets_of:' .. server)) end
end
return {tonumber(redis.call('HGET', key('meta'), 'version') or 0), allowed, held}
